# A test of a planned share: whether each unit was assigned with the probability that was declared.
#
# The unit is one user of a split, assigned to the tested arm (1) or not (0).  Under the hypothesis
# the probability of a 1, given everything earlier, lies between low and high for every unit.  For
# p > high the likelihood ratio of p to high grows with a 1, so its mean is at most 1 for every
# probability that the hypothesis permits; likewise for p < low.  A mixture over p is then an
# e-process, and so is the average of both sides: it is valid at every number of units at once
# (Ville), and the probabilities of the units may differ.
#
# The alternatives are a fixed grid, geometric in the distance from the planned share, so that small
# and large mismatches grow at nearly the best rate.  It stands for the Beta distribution of the
# Beta-Binomial mixture, whose part beyond a tolerance has no closed form without special functions.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_DISTANCES: Floats = np.geomspace(0.02, 4.0, 20)  # of alternatives from the bound, nats
_IMPOSSIBLE = 1000.0  # largest log factor of one unit, nats
_BLOCK = 1 << 15  # units whose evidence is computed together


@dataclass(frozen=True)
class PlannedShare:
    """The hypothesis that a share is the planned one.

    Args:
        planned: in (0, 1].
        tolerance: relative difference that is permitted, in [0, 1).

    Source:
        M. Lindon, A. Malek, Anytime-valid inference for multinomial count data, 2022, for a Beta
        mixture and no tolerance; the grid and the tolerance are ours.

    >>> round(float(PlannedShare(0.05, 0.02).log_e(60, 2000)), 1)  # 3 % of 2,000 users
    6.2
    """

    planned: float
    tolerance: float = 0.0

    @property
    def low(self) -> float:
        return self.planned * (1 - self.tolerance)

    @property
    def high(self) -> float:
        return min(1.0, self.planned * (1 + self.tolerance))

    @cached_property
    def _growth(self) -> tuple[Floats, Floats]:
        """Log factor of a 1 and of a 0 under each alternative, nats."""
        below = self.low * np.exp(-_DISTANCES)
        hit = np.log(below / self.low)
        with np.errstate(divide="ignore"):
            # of a share of 1 a 0 is impossible; a finite factor is printed and stored as a number
            miss = np.minimum(np.log1p(-below) - np.log1p(-self.low), _IMPOSSIBLE)
        if self.high >= 1:
            return hit, miss  # no share is larger
        odds = self.high / (1 - self.high) * np.exp(_DISTANCES)
        above = odds / (1 + odds)
        more = np.log(above / self.high), -np.log1p(odds) - np.log1p(-self.high)
        return np.concatenate([hit, more[0]]), np.concatenate([miss, more[1]])

    def log_e(self, hits: Any, units: Any) -> Floats:
        """The evidence against the hypothesis, nats, in the shape of the arguments.

        Args:
            hits: units assigned to the tested arm; units: of all.
        """
        hits = np.asarray(hits, float)[..., None]
        misses = np.asarray(units, float)[..., None] - hits
        hit, miss = self._growth
        grown = hits * hit + misses * miss
        return np.logaddexp.reduce(grown, axis=-1) - np.log(len(hit))

    def peak(self, hit_N: Any) -> float:
        """The largest evidence over all beginnings of a sequence of units, nats; 0 without any."""
        hits_N = np.cumsum(np.asarray(hit_N, float))
        units_N = np.arange(1, len(hits_N) + 1)
        largest = 0.0
        for start in range(0, len(hits_N), _BLOCK):
            block = slice(start, start + _BLOCK)
            largest = max(largest, float(self.log_e(hits_N[block], units_N[block]).max()))
        return largest

    def units_needed(self, share: float, log_price: float) -> int:
        """The number of units at which a share would be rejected, if it came out exactly.

        Args:
            share: outside of the hypothesis; log_price: threshold of the evidence, nats.
        """
        least, most = 0, 1
        while self.log_e(share * most, most) < log_price:
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            if self.log_e(share * middle, middle) < log_price:
                least = middle
            else:
                most = middle
        return most
