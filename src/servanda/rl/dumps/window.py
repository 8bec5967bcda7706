# The verdict on a step; what it does not decide is judged on the last few steps together.
#
# Both `check DIR` and `watch` judge steps by this rule.  A dump is one attempt of its contract, and
# its whole and all its steps together share the alpha of that attempt (`WHOLE_PART`).  Of the part
# of the steps the t-th has 2 / ((t + 1)(t + 2)), which sums to at most 1.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.evidence import Evidence, Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict, judge, unsound
from servanda.rl.dumps.diagnosis import Atoms
from servanda.rl.dumps.filters import ONLY_FILTERED, bracketed
from servanda.rl.dumps.preset import AMPLE, WORKLOAD
from servanda.rl.dumps.statistics import added
from servanda.theory.stats.interval import units_at_best

WHOLE_PART = 1 / 2  # share of a dump's alpha for violations of the whole; the steps have the rest
_PARTS = 20  # a slice with this fraction (1/n) of the tokens should be decidable
MOST_STEPS = 12  # most steps that a slice is judged on


def step_part(number: int) -> float:
    """The share of the number-th step, from 1, in the error probability of all steps.

    >>> round(sum(step_part(t) for t in range(1, 10_000)), 3)
    1.0
    """
    return 2 / ((number + 1) * (number + 2))


def window_of(needed: int, steps: int, trained: int) -> int:
    """The number of steps that a slice is judged on together.

    Args:
        needed: tokens that a slice needs; trained: trained tokens of the first `steps` steps.
    """
    return min(max(math.ceil(_PARTS * needed * steps / max(trained, 1)), 1), MOST_STEPS)


def tokens_to_decide(plan: Plan) -> int:
    """The tokens with which a good pair decides every enforced mean on the whole; 0 without one."""
    needs = [
        units_at_best(cell.kind.feed.limit, plan.alpha, cell.kind.feed.best) or 0
        for cell in plan.cells
        if isinstance(cell.kind, Certificate) and cell.cut.name == WHOLE and cell.clause.enforced
    ]
    return AMPLE * max(needs, default=0)


@dataclass(frozen=True)
class _Part:
    """A step: its sums, the same including removed tokens, and the scope of its cells."""

    step: int
    trained: Weighed
    drawn: Weighed | None
    atoms: Atoms


@dataclass(frozen=True)
class StepVerdict:
    """The verdict on one step.

    Args:
        cells: its cells; those of slices may include earlier steps.
        together: slice -> first of the steps that it is judged on.
        atoms: atoms of the tokens of its cells.
        errors: why its data cannot be evidence; such a step is not judged.
        needs_tokens: approximate number of tokens for a decision, if undecided.
    """

    cells: tuple[CellVerdict, ...]
    together: Mapping[str, int]
    atoms: Atoms
    errors: tuple[str, ...] = ()
    needs_tokens: int | None = None

    @property
    def outcome(self) -> Outcome:
        if self.errors:
            return "error"
        cells = (c for c in self.cells if c.enforced and c.outcome != "not applicable")
        return worst([cell.outcome for cell in cells])


class Window:
    """The last steps of a run.

    Args:
        size: number of steps that a slice, or a thin step, is judged on together.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[_Part] = []

    def judge(
        self,
        number: int,
        step: int,
        plan: Plan,
        trained: Evidence,
        drawn: Evidence | None,
        atoms: Atoms,
        errors: Sequence[str] = (),
        *,
        intervals: bool = True,
    ) -> StepVerdict:
        """Judge the number-th step, from 1: alone, and what is undecided with earlier steps.

        Args:
            trained: statistics of the trained tokens; drawn: including removed tokens, None if none
                were removed.
            atoms: atoms of the step's tokens; errors: why they cannot be evidence.
        """
        # a step is evaluated twice: alone, and with earlier steps
        part = (1 - WHOLE_PART) * step_part(number) / (2 if self.size > 1 else 1)

        def verdict(trained: Evidence, drawn: Evidence | None) -> Verdict:
            own = judge(plan, trained, intervals=intervals, part=part)
            if drawn is None:
                return own
            return bracketed(own, judge(plan, drawn, intervals=intervals, part=part))

        alone = verdict(trained, drawn)
        failed = [c.note for c in alone.cells if c.enforced and c.outcome == "error"]
        if not trained.rounds[WORKLOAD, 0].tokens:
            errors = ()  # a completely filtered step has no data to check
        if errors := (*errors, *failed):
            pairs = zip(alone.cells, unsound(alone, errors[0]).cells, strict=True)
            # a failed validity check reports it
            cells = tuple(c if c.outcome == "error" else other for c, other in pairs)
            return StepVerdict(cells, {}, atoms, errors, alone.needs_tokens)
        if self.size == 1:
            return StepVerdict(alone.cells, {}, atoms, (), alone.needs_tokens)
        sums = trained.rounds[WORKLOAD, 0]
        others = [known for known in self._parts if known.step != step]
        both = None if drawn is None else drawn.rounds[WORKLOAD, 0]
        self._parts = [*others, _Part(step, sums, both, atoms)][-self.size :]
        decided = ("holds", "violated", "not applicable")
        # a whole that a step of a good pair would decide is judged on the step alone
        thin = sums.tokens < tokens_to_decide(plan)
        if all((c.slice == WHOLE and not thin) or c.outcome in decided for c in alone.cells):
            return StepVerdict(alone.cells, {}, self._atoms(), (), alone.needs_tokens)
        joint = verdict(*self._together(trained))
        full = len(self._parts) == self.size
        cells = tuple(
            own if own.slice == WHOLE and not thin else _chosen(own, other, full)
            for own, other in zip(alone.cells, joint.cells, strict=True)
        )
        needs = joint.needs_tokens if thin else alone.needs_tokens
        pairs = zip(cells, alone.cells, strict=True)
        first = self._parts[0].step
        together = {c.slice: first for c, own in pairs if c is not own}
        return StepVerdict(cells, together, self._atoms(), (), needs)

    def _together(self, trained: Evidence) -> tuple[Evidence, Evidence | None]:
        """The evidence of all steps of the window, and the same including removed tokens."""
        every = replace(
            trained, rounds={(WORKLOAD, 0): reduce(added, (p.trained for p in self._parts))}
        )
        if all(part.drawn is None for part in self._parts):
            return every, None
        drawn = reduce(added, (part.drawn or part.trained for part in self._parts))
        return every, replace(trained, rounds={(WORKLOAD, 0): drawn})

    def _atoms(self) -> Atoms:
        sums: dict[int, list[float]] = {}
        for part in self._parts:
            for key, (n, tv) in part.atoms.items():
                had = sums.get(key, [0.0, 0.0])
                sums[key] = [had[0] + n, had[1] + tv]
        return sums


def _chosen(own: CellVerdict, joint: CellVerdict, full: bool) -> CellVerdict:
    """The cell of the step alone, or of the window if that decides its slice."""
    # a violation on the step alone, or before the filter, is not undone by earlier steps
    if own.outcome in ("holds", "violated"):
        return own
    if own.reason in ONLY_FILTERED:
        return own
    if joint.outcome == "inconclusive" and not full and own.slice != WHOLE:
        return joint.but(outcome="not applicable", note="too few steps yet")
    return joint
