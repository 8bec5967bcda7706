# The mass gap: the difference of the two kernels' probabilities of a set of outcomes.
#
# p(S) - q(S) is bounded from both sides by means of bounded variables, without assuming that infer
# can sample every token of train: with w cut at 2,
#
#     q(S) - p(S)  <=  E_infer 1_S (1 - min(w, 2))
#     p(S) - q(S)  <=  E_infer 1_not-S (1 - min(w, 2)),
#
# because cutting only reduces p, and a gain of S is a loss of its complement.  Each bound is
# certified at half of alpha.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.judgement.clauses.base import (
    FLOOR,
    WITHIN_NOISE,
    Array,
    Cell,
    CellVerdict,
    Interim,
    Sampled,
    View,
    blank,
)
from servanda.judgement.clauses.statistical import Process, rests_on, total, units_of
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.interval import interval

Sides = tuple[Process, Process]  # of the slice, and of its complement


@dataclass(frozen=True)
class MassGap(Sampled):
    """|p(S) - q(S)| of a slice of outcomes, per token of its contexts, is at most the limit."""

    limit: float
    counts = True

    words: ClassVar[Mapping[str, str]] = {
        "holds": "the data show both kernels' mass there within the limit of each other",
        "violated": "they show it further apart, beyond the limit and " + FLOOR,
    }

    def weigh(self, cell: Cell, view: View) -> Sides:
        inside_N = view.inside(cell.cut)
        return self._process(cell, view, inside_N), self._process(cell, view, 1 - inside_N)

    def _process(self, cell: Cell, view: View, inside_N: Array) -> Process:
        """1 - min(w, 2) where inside, else 0; mapped from [-1, 1] to [0, 1]."""
        values_N = view.values("mass_gap")
        x_N = np.where(inside_N == 1, (1 - np.minimum(values_N, 1.0)) / 2, 0.5)
        known_N = np.where(np.isnan(values_N + inside_N), np.nan, x_N)
        return units_of(cell, view, known_N).process(cell)

    def noise(self, cell: Cell, view: View) -> tuple[float, int]:
        """(sum of w - 1 over the slice, cut at 1; tokens of its contexts) of a peer."""
        values_N = view.values("mass_gap")
        inside_N = view.inside(cell.cut)
        known_N = view.mask(cell.cut.given) & ~np.isnan(values_N + inside_N)
        within_N = known_N & (inside_N == 1)
        return float(np.minimum(values_N[within_N], 1.0).sum()), int(known_N.sum())

    def floor(self, cell: Cell, parts: list[tuple[tuple[float, int], ...]]) -> float | None:
        gaps = []
        for side in zip(*(p for p in parts if p), strict=True):
            n = sum(count for _, count in side)
            if n:
                gaps.append(abs(sum(total for total, _ in side)) / n)
        return max(gaps, default=None)

    def judge(
        self, cell: Cell, rounds: list[Sides], floor: float | None, look: Interim
    ) -> CellVerdict:
        inside, outside = (total(cell, [r[i] for r in rounds]) for i in (0, 1))
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            value=1 - 2 * inside.mean if inside.n else None,
            limit=self.limit,
            floor=floor,
            n=inside.n,
            units=cell.units,
            missing=inside.missing,
            alpha=look.alpha,
            assumptions=rests_on(cell),
            open=True,
        )
        if not inside.n:
            return verdict.but(note=f"slice {cell.cut.name!r} met no token; widen the workload")
        low, high = _gap(inside, outside, look.alpha)
        verdict = verdict.but(interval=(low, high))
        if -self.limit <= low and high <= self.limit and look.launched >= look.first:
            return verdict.but(outcome="holds", open=False)
        red_line = max(self.limit, 2 * (floor or 0.0))
        low, high = _gap(inside, outside, look.alpha_violated)
        if low > red_line or high < -red_line:
            return verdict.but(outcome="violated", open=False)
        if self.limit < abs(verdict.value or 0.0) <= red_line:
            return verdict.but(note=WITHIN_NOISE, reason="within noise")
        return verdict.but(more=max(look.launched, look.first - look.launched, 1))


def _gap(inside: Process, outside: Process, alpha: float) -> tuple[float, float]:
    """The anytime-valid interval of p(S) - q(S) at confidence 1 - alpha."""
    ends = [2 * interval(process, shared(alpha, 2))[1] - 1 for process in (inside, outside)]
    return -ends[0], ends[1]
