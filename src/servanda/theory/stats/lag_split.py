# Lag split: how much of |log ratio| the kernels explain, and how much the age of the weights.
#
# A line through |d| against the lag: its value at lag 0 is the gap of the kernels, its slope what
# an update adds.  The lag of a token depends on when its response was complete, hence on the tokens
# after it, so this explains and promises nothing.  Prompt groups are the units of the bootstrap:
# they are gathered in a fixed number of buckets, so that memory does not grow with a run.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.block_bootstrap import student_t

Array = NDArray[Any]

BUCKETS = 64
RESAMPLES = 1000
_SEED = 0
_LEAST = 8  # fewest buckets with tokens, for an interval
_SUMS = 5  # tokens, lag, lag^2, |d|, lag |d|


@dataclass(frozen=True)
class LagLine:
    """|d| = gap + slope * lag, nats; an interval of 95 %."""

    gap: float
    slope: float
    slope_interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.slope_interval
        return (
            f"mean |log ratio| is {self.gap:.3g} nats at staleness 0, and an update adds "
            f"{self.slope:.3g} [{low:.3g}, {high:.3g}]: an estimate, not a bound"
        )


@dataclass(frozen=True)
class LagSplit:
    """Sums over tokens by bucket of their prompt group; `+` adds disjoint tokens.

    Args:
        sums_KS: of tokens, lag, lag^2, |d| and lag |d|, per bucket; () without tokens.
    """

    sums_KS: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, drift_N: Array, lag_N: Array, group_N: Array, names: Sequence[str]) -> LagSplit:
        """From tokens with a finite |log ratio| and a known lag; others are left out.

        Args:
            drift_N: |log ratio|, nats; lag_N: updates.
            group_N: index of each token's prompt group in `names`.
        """
        bucket_G = np.array([crc32(name.encode()) % BUCKETS for name in names], dtype=np.int64)
        known_N = np.isfinite(drift_N) & np.isfinite(lag_N)
        if not known_N.any():
            return cls()
        d, lag, at = drift_N[known_N], lag_N[known_N], bucket_G[group_N[known_N]]
        columns = (np.ones(len(d)), lag, lag * lag, d, lag * d)
        sums = [np.bincount(at, weights=column, minlength=BUCKETS) for column in columns]
        return cls(tuple(map(tuple, np.transpose(sums).tolist())))

    def __add__(self, other: LagSplit) -> LagSplit:
        if not self.sums_KS or not other.sums_KS:
            return self if self.sums_KS else other
        both = zip(self.sums_KS, other.sums_KS, strict=True)
        return LagSplit(
            tuple(tuple(a + b for a, b in zip(one, two, strict=True)) for one, two in both)
        )

    @property
    def line(self) -> LagLine | None:
        """The line; None if all tokens are of one age, or of too few groups."""
        if not self.sums_KS:
            return None
        sums_KS = np.array(self.sums_KS)
        sums_KS = sums_KS[sums_KS[:, 0] > 0]
        n = len(sums_KS)
        (gap,), (slope,) = _lines(sums_KS.sum(axis=0, keepdims=True))
        if n < _LEAST or not math.isfinite(slope):
            return None
        rng = np.random.default_rng(_SEED)
        _, slope_R = _lines(rng.multinomial(n, [1 / n] * n, size=RESAMPLES) @ sums_KS)
        # a bootstrap over few units is too narrow
        reach = math.sqrt(n / (n - 1)) * student_t(0.975, n - 1) / NormalDist().inv_cdf(0.975)
        ends = np.quantile(slope_R[np.isfinite(slope_R)], (0.025, 0.975))
        low, high = slope + reach * (ends - slope)
        return LagLine(float(gap), float(slope), (float(low), float(high)))


def _lines(sums_RS: Array) -> tuple[Array, Array]:
    """Gap and slope of least squares, [R] each; NaN where all tokens are of one age."""
    n, lag, square, d, product = (sums_RS[:, i] for i in range(_SUMS))
    spread = n * square - lag * lag
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 1e-9 * n * square, (n * product - lag * d) / spread, np.nan)
        return (d - slope * lag) / n, slope
