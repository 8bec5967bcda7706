# Evidence about the ratio of two means that are measured on the same units.
#
# x_i and y_i lie in [0, 1], with any dependence between them.  If the running mean of x is at least
# `r` times that of y, then prod(1 + b (r y_i - x_i)) is bounded by a test martingale for every b in
# [0, 1): given everything earlier, factor i has the mean 1 + b z_i, and log is concave, so that
# prod(1 + b z_i) <= (1 + b mean z)^n <= 1.  Likewise prod(1 + b / r (x_i - r y_i)) if it is at
# most `r` times it.  Pairs cancel what x and y have in common, which two intervals cannot.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from servanda.theory.stats.bets import Floats, log_mean_exp
from servanda.theory.stats.log_moment import SCALE, check_unit

# Never change: they are part of the meaning of stored evidence.
BETS: Floats = np.geomspace(0.02, 0.98, 6)
_GRID = np.geomspace(0.5, 4.0, 41)  # ratios of an interval


def ratios(limit: float) -> tuple[float, ...]:
    """The ratios that evidence is kept about: the limit, then those of an interval."""
    return (limit, *_GRID.tolist())


@dataclass(frozen=True)
class MeanRatio:
    """Sufficient statistics of pairs; `+` merges disjoint closed rounds.

    Args:
        of: the ratios, [R]; n: units, of which `missing` have no value.
        x, y: sums over the units with a value.
        below, above: [R][B] sums of logs about each ratio, in 2^-40; a missing unit counts
            against both.
    """

    of: tuple[float, ...]
    n: int = 0
    missing: int = 0
    x: float = 0.0
    y: float = 0.0
    below: tuple[tuple[int, ...], ...] = ()
    above: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_units(
        cls, x_U: Floats, y_U: Floats, of: tuple[float, ...], missing: int = 0
    ) -> MeanRatio:
        """The statistics of one closed round.

        Args:
            x_U, y_U: in [0, 1], in dispatch order.
            missing: dispatched units without a value.

        Raises:
            EvidenceError: a value is outside [0, 1].
        """
        check_unit(x_U)
        check_unit(y_U)
        below, above = [], []
        for ratio in of:
            z_U = ratio * y_U - x_U
            below.append(_scaled(_logs(z_U, BETS) + missing * np.log1p(-BETS)))
            above.append(_scaled(_logs(-z_U, BETS / ratio) + missing * np.log1p(-BETS)))
        sums = math.fsum(x_U.tolist()), math.fsum(y_U.tolist())
        return cls(of, len(x_U) + missing, missing, *sums, tuple(below), tuple(above))

    def __add__(self, other: MeanRatio) -> MeanRatio:
        if not (self.n and other.n):
            return self if self.n else other
        return MeanRatio(
            self.of,
            self.n + other.n,
            self.missing + other.missing,
            self.x + other.x,
            self.y + other.y,
            _added(self.below, other.below),
            _added(self.above, other.above),
        )

    @property
    def value(self) -> float:
        """The ratio of the means; NaN without a y."""
        return self.x / self.y if self.y else math.nan

    def growth(self, at: int = 0) -> tuple[Floats, Floats]:
        """log e-values of each bet that the ratio is below, and above, the at-th ratio; [B]."""
        if not self.n:
            return np.zeros(len(BETS)), np.zeros(len(BETS))
        return _nats(self.below[at]), _nats(self.above[at])

    def interval(self, alpha: float) -> tuple[float, float]:
        """The ratios that are not refuted, each end at alpha / 2; 0 and inf beyond the grid."""
        price = math.log(2 / alpha)
        grid = range(1, len(self.of))
        low = [i for i in grid if log_mean_exp(self.growth(i)[1]) >= price]
        high = [i for i in grid if log_mean_exp(self.growth(i)[0]) >= price]
        return (
            self.of[max(low)] if low else 0.0,
            self.of[min(high)] if high else math.inf,
        )


def _logs(z_U: Floats, bets: Floats) -> Floats:
    return np.log1p(bets[:, None] * z_U).sum(axis=1)


def _scaled(sums: Floats) -> tuple[int, ...]:
    return tuple(math.floor(v * SCALE) for v in sums.tolist())


def _nats(sums: tuple[int, ...]) -> Floats:
    return np.array([v / SCALE for v in sums])


def _added(
    a: tuple[tuple[int, ...], ...], b: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x + y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))
