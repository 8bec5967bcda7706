# LogMoment: the basic certificate.  Evidence about a running mean of [0, 1] variables.
#
# Assumes X_i in [0, 1] and E[X_i | everything earlier] = mu_i, with arbitrary dependence.  prod (1
# + t X_i) / (1 + t mu_i) is a non-negative martingale, log is concave so prod (1 + t mu_i) <= (1 +
# t mean)^n; averaging over t and Ville's inequality make every statement below hold at all n and
# all limits at once, with probability 1 - alpha.  Unlike a confidence interval for independent
# samples it may be evaluated after every round.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import NEG, POS, Floats, mixed, weights_above, weights_below

SCALE = float(1 << 40)  # log sums are stored as integers, so that merging is exact


def _unscaled(sums: tuple[int, ...]) -> Floats:
    """Integer log sums in nats; they exceed 64 bits, so each is divided as a Python int."""
    return np.array([value / SCALE for value in sums])


def check_unit(x_N: Floats) -> None:
    """Refuse values outside the assumptions.

    Raises:
        EvidenceError: a value is NaN or outside [0, 1].
    """
    if x_N.size and not (x_N.min() >= 0.0 and x_N.max() <= 1.0):
        bad = x_N[~((x_N >= 0.0) & (x_N <= 1.0))][0]
        raise EvidenceError(f"a certified value must lie in [0, 1], found {bad}")


class Process:
    """Evidence for and against every limit of a mean at once, of `n` units."""

    n: int

    def below_growth(self, limit: float) -> Floats:
        """log e-value of each NEG component against "the mean is `limit` or more"."""
        raise NotImplementedError

    def above_growth(self, limit: float) -> Floats:
        """log e-value of each POS component against "the mean is `limit` or less"."""
        raise NotImplementedError

    def log_e_below(self, limit: float, weight: Floats | None = None) -> float:
        """Evidence that the mean is below the limit, in nats; increases with the limit.

        Args:
            weight: of the components, fixed before the data; None: equal ones.  The limit may
                depend on the data.
        """
        return mixed(self.below_growth(limit), weights_below() if weight is None else weight)

    def log_e_above(self, limit: float, weight: Floats | None = None) -> float:
        """Evidence that the mean is above the limit, in nats; decreases with the limit."""
        return mixed(self.above_growth(limit), weights_above() if weight is None else weight)


@dataclass(frozen=True)
class LogMoment(Process):
    """Sufficient statistics of a stream in dispatch order; `+` merges disjoint closed rounds.

    Args:
        n: units, including missing ones.
        below: sum of log1p(NEG x), in 2^-40; a missing unit counts as x = 1.
        above: sum of log1p(POS x), in 2^-40; a missing unit counts as x = 0.
        total, missing: sum of the known x, and the number of units without a value.
    """

    n: int = 0
    below: tuple[int, ...] = (0,) * len(NEG)
    above: tuple[int, ...] = (0,) * len(POS)
    total: float = 0.0
    missing: int = 0

    @classmethod
    def of(cls, x_N: Floats, missing: int = 0) -> LogMoment:
        """The statistics of one closed round.

        Args:
            x_N: values in [0, 1], in dispatch order.
            missing: dispatched units without a value.
        """
        x_N = np.asarray(x_N, dtype=np.float64)
        check_unit(x_N)
        # many values repeat (shares are 0 or 1): compute each logarithm once
        value_M, count_M = np.unique(x_N, return_counts=True)
        below = np.log1p(NEG[:, None] * value_M) @ count_M + missing * np.log1p(NEG)
        above = np.log1p(POS[:, None] * value_M) @ count_M
        return cls(
            n=len(x_N) + missing,
            below=tuple(math.floor(v * SCALE) for v in below.tolist()),
            above=tuple(math.floor(v * SCALE) for v in above.tolist()),
            total=math.fsum(x_N.tolist()),
            missing=missing,
        )

    def __add__(self, other: LogMoment) -> LogMoment:
        return LogMoment(
            self.n + other.n,
            tuple(a + b for a, b in zip(self.below, other.below, strict=True)),
            tuple(a + b for a, b in zip(self.above, other.above, strict=True)),
            self.total + other.total,
            self.missing + other.missing,
        )

    @property
    def known(self) -> int:
        """Units with a value."""
        return self.n - self.missing

    @property
    def mean(self) -> float:
        """The mean of the units with a value; NaN without any."""
        return self.total / self.known if self.known else math.nan

    def below_growth(self, limit: float) -> Floats:
        return _unscaled(self.below) - self.n * np.log1p(NEG * limit)

    def above_growth(self, limit: float) -> Floats:
        return _unscaled(self.above) - self.n * np.log1p(POS * limit)
