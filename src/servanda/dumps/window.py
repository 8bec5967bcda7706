# A step is judged alone, and a slice that it does not decide on the last few steps together.
#
# Both `check DIR` and `watch` judge steps by this rule.  A dump is one attempt of its contract and
# spends half of 1 - confidence on the whole (`stats.attempt_alpha`).  The other half is for its
# steps: the t-th may spend 2 / ((t + 1)(t + 2)) of it, which adds up to 1 however many there are.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from servanda.clauses import CellVerdict
from servanda.contract import WHOLE
from servanda.dumps.weighing import WORKLOAD, added
from servanda.evidence import Evidence, Weighed
from servanda.plan import Plan
from servanda.verdict import Verdict, judge

_PARTS = 20  # a slice with one part in so many of the tokens should be decided
MOST_STEPS = 12  # that a slice is judged on


def step_part(number: int) -> float:
    """Of what all steps may spend, the share of the number-th step, from 1.

    >>> round(sum(step_part(t) for t in range(1, 10_000)), 3)
    1.0
    """
    return 2 / ((number + 1) * (number + 2))


def window_of(needed: int, steps: int, trained: int) -> int:
    """Steps that a slice is judged on together.

    Args:
        needed: tokens that a slice must have; trained: those of the first `steps` steps.
    """
    return min(max(math.ceil(_PARTS * needed * steps / max(trained, 1)), 1), MOST_STEPS)


@dataclass(frozen=True)
class _Part:
    step: int
    weighed: Weighed
    atoms: Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Judged:
    """The answer about one step.

    Args:
        alone: the verdict on its tokens; cells: its cells, slices with the steps before it.
        together: slices that are judged with earlier steps -> the first of those.
        atoms: of the tokens that its cells speak of.
    """

    alone: Verdict
    cells: tuple[CellVerdict, ...]
    together: Mapping[str, int]
    atoms: Mapping[int, Sequence[float]]


class Window:
    """The last steps of a run.

    Args:
        size: steps that a slice is judged on together.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[_Part] = []

    def alone(
        self, number: int, plan: Plan, evidence: Evidence, *, intervals: bool = True
    ) -> Verdict:
        """One step by itself; the number-th."""
        return judge(plan, evidence, intervals=intervals, part=self._part(number))

    def judged(
        self,
        number: int,
        step: int,
        plan: Plan,
        evidence: Evidence,
        alone: Verdict,
        atoms: Mapping[int, Sequence[float]],
        *,
        intervals: bool = True,
    ) -> Judged:
        """A step whose data is sound, and its slices with the steps before it."""
        if self.size == 1:
            return Judged(alone, alone.cells, {}, atoms)
        weighed = evidence.rounds[WORKLOAD, 0]
        others = [part for part in self._parts if part.step != step]
        self._parts = [*others, _Part(step, weighed, atoms)][-self.size :]
        decided = ("holds", "violated", "not applicable")
        if all(c.slice == WHOLE or c.outcome in decided for c in alone.cells):
            return Judged(alone, alone.cells, {}, self._atoms())
        total = reduce(added, (part.weighed for part in self._parts))
        both = judge(
            plan,
            replace(evidence, rounds={(WORKLOAD, 0): total}),
            intervals=intervals,
            part=self._part(number),
        )
        full = len(self._parts) == self.size
        cells = []
        for own, joint in zip(alone.cells, both.cells, strict=True):
            cell = joint
            if own.slice == WHOLE or own.outcome in ("holds", "violated"):
                cell = own
            elif joint.outcome == "inconclusive" and not full:
                cell = joint.but(outcome="not applicable", note="too few steps yet")
            cells.append(cell)
        pairs = zip(cells, alone.cells, strict=True)
        first = self._parts[0].step
        together = {c.slice: first for c, own in pairs if c is not own}
        return Judged(alone, tuple(cells), together, self._atoms())

    def _part(self, number: int) -> float:
        # a step is looked at twice: alone, and with those before it
        return step_part(number) / (2 if self.size > 1 else 1)

    def _atoms(self) -> Mapping[int, Sequence[float]]:
        sums: dict[int, list[float]] = {}
        for part in self._parts:
            for key, (n, tv) in part.atoms.items():
                had = sums.get(key, [0.0, 0.0])
                sums[key] = [had[0] + n, had[1] + tv]
        return sums
