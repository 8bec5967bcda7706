# The likely cause of a run's violated steps, from a sample of their tokens.
#
# A run keeps tokens of its first step and of its last violated ones, whatever reads it, so that the
# same steps have the same cause in a dump that is watched and in a monitor.

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servanda.judgement.breakdown import Advice
from servanda.judgement.causes.forecast import advise
from servanda.judgement.causes.gap_cause import explain
from servanda.judgement.causes.token_table import TokenTable
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.plan import Plan
from servanda.rl.steps.blocks import paired, taken
from servanda.rl.trend.changes import TREND, changed
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair

Match = Mapping[str, Mapping[str, Any]]  # of a slice: field -> operator -> value
STEP_TOKENS = 65_536  # most trained tokens that are kept of a step
_LAST = 6  # violated steps that are kept


def explained(
    pairs: Iterable[tuple[int, TracePair, Sequence[str]]],
    limit: float,
    problems: Mapping[str, str],
    place: str,
    update_tokens: int,
    violated: Sequence[Match] = (),
) -> Advice | None:
    """The likely cause of the gap of some tokens, and what to do; None without a usable token.

    Args:
        limit: on the mean of (1 - w)^+.
        problems: failed data quality checks, by name.
        place: of the data, for commands.
        update_tokens: trained tokens of one update.
        violated: conditions of the violated slices.
    """
    table = TokenTable.of(pairs)
    if table is None:
        return None
    return advise(table, explain(table, limit, problems, place, violated), update_tokens)


def places(plan: Plan, red: Collection[str]) -> list[Match]:
    """The conditions of violated slices; none where most slices are violated: none is a place."""
    matches: dict[str, dict[str, dict[str, Any]]] = {}
    for cut in dict.fromkeys(cell.cut for cell in plan.cells):
        for term in cut.terms:
            matches.setdefault(cut.name, {}).setdefault(term.field, {})[term.op] = term.value
    found: list[Match] = [match for name, match in matches.items() if name in red]
    return [] if 2 * len(found) > len(matches) else found


def of_tokens(cell: CellVerdict) -> bool:
    """Whether a cell is about the mean of tokens, whose gap has a cause to search for."""
    return cell.section == "statistical" and cell.units != "sequences"


def findings_of(red: Iterable[CellVerdict]) -> list[str]:
    """What failed checks say themselves of violated cells: what is wrong, and where."""
    return [c.note for c in red if c.section not in ("statistical", TREND) and c.note]


class FirstSequences:
    """Takes the first sequences of a step, up to about so many trained tokens."""

    def __init__(self, tokens: int = STEP_TOKENS) -> None:
        self._left = tokens
        self.parts: list[Rollouts] = []

    def add(self, block: Rollouts) -> None:
        if self._left <= 0:
            return
        ends = np.flatnonzero(block.trained_S.cumsum() >= self._left)
        part = taken(block, 0, int(ends[0]) + 1 if len(ends) else len(block))
        self.parts.append(copy.deepcopy(part))  # and not a view that keeps the whole block
        self._left -= int(self.parts[-1].trained_S.sum())


def pairs_of(parts: Iterable[Rollouts]) -> Iterator[tuple[int, TracePair, Sequence[str]]]:
    """Both sides of blocks, each sequence with its own dispatch index within its step."""
    step, first = None, 0
    for part in parts:
        first = first if part.step == step else 0
        yield part.step, paired(part, first), part.source_S
        step, first = part.step, first + len(part)


class RunCauses:
    """Explains the violated steps of a run.

    Args:
        plan: with the slices of the run.
        limit: on the mean of (1 - w)^+; place: of the data, for commands.
    """

    def __init__(self, plan: Plan, limit: float, place: str) -> None:
        self._plan, self._limit, self._place = plan, limit, place
        self._first: Sequence[Rollouts] = ()
        self._last: dict[int, Sequence[Rollouts]] = {}
        self._red: frozenset[str] = frozenset()
        self._seen = self._due = 0  # violated steps with these slices, and at which to look again
        self._advice: Advice | None = None

    def begin(self, sample: Sequence[Rollouts]) -> None:
        """Keep tokens of the first step, unless there are some."""
        self._first = self._first or sample

    def of(
        self, cells: Sequence[CellVerdict], step: int, sample: Sequence[Rollouts], tokens: int
    ) -> Advice | None:
        """The likely cause of a violated step, and what to do; None without one.

        A failed check says itself what is wrong.  The tokens are searched when other slices are
        violated than before, and again whenever the violated steps have doubled.

        Args:
            sample: of its tokens; tokens: trained tokens of the step.
        """
        red = [c for c in cells if c.enforced and c.outcome == "violated"]
        gaps = frozenset(c.slice for c in red if of_tokens(c))
        notes = findings_of(red)
        if gaps:
            last = {known: of for known, of in self._last.items() if known < step}
            self._last = dict([*last.items(), (step, sample)][-_LAST:])
            self._search(gaps, tokens)
        advice = self._advice if gaps else None
        if not notes:
            change = "" if advice is not None else changed(cells)
            return Advice("", change) if change else advice
        causes = [*notes, *([advice.cause] if advice is not None else [])]
        return Advice("", "; ".join(causes))

    def _search(self, red: frozenset[str], tokens: int) -> None:
        if red != self._red:
            self._red, self._seen, self._due = red, 0, 1
        self._seen += 1
        if self._seen < self._due:
            return
        self._due *= 2
        known = {part.step for parts in self._last.values() for part in parts}
        first = [part for part in self._first if part.step not in known]
        parts = [*first, *(part for parts in self._last.values() for part in parts)]
        where = places(self._plan, red)
        self._advice = explained(pairs_of(parts), self._limit, {}, self._place, tokens, where)
