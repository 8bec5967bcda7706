# Feeds: the scaling of a metric's values to x in [0, 1], and the limit of their mean.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from servanda.contract.clause import Clause, Relative
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.stats.bets import weights_above, weights_below

if TYPE_CHECKING:
    from servanda.judgement.clauses.base import Array

_HAIR = 1e-9  # tolerance below 0 for rounding; beyond it the statistics raise an error
_CUT = 20.0  # limits after which an unbounded metric is cut, for refutation


@dataclass(frozen=True)
class Feed:
    """x = (value - low) / scale, cut at 1; or whether a value exceeds a threshold.

    Args:
        limit: of the mean of x.
        scale, low: metric units per x, and at x = 0.
        threshold: a percentile pN at limit L means that at most (100-N) % of the tokens exceed L;
            limit is then that share.
        best: the smallest possible mean of x, for identical kernels.
        proves: whether a small mean of x implies a small mean of the metric; false if the metric is
            cut without `clip` in the contract.
    """

    limit: float
    scale: float = 1.0
    low: float = 0.0
    threshold: float | None = None
    best: float = 0.0
    proves: bool = True

    def x(self, values_N: Array) -> Array:
        if self.threshold is not None:
            return (values_N > self.threshold).astype(np.float64)
        x_N = np.minimum((values_N - self.low) / self.scale, 1.0)
        return np.where((x_N < 0) & (x_N > -_HAIR), 0.0, x_N)

    def value(self, x: float) -> float:
        """A mean of x in units of the metric."""
        return self.low + x * self.scale

    @property
    def weights(self) -> tuple[Array, Array]:
        """The weights of the bets for a mean below the limit, and for one above."""
        return weights_below(self.limit, self.best), weights_above(self.limit, self.best)

    def red_line(self, floor: float | None) -> float:
        """The mean of x above which a cell is violated: the limit, or twice the noise floor."""
        return max(self.limit, 2 * floor + self.low / self.scale) if floor else self.limit


def share_beyond(clause: Clause) -> float:
    """The share of tokens that may exceed the limit of a percentile clause."""
    assert clause.percentile is not None
    # avoid the rounding error of 100 - 99.9
    return round((100.0 - clause.percentile) / 100.0, 12)


def feed_of(clause: Clause) -> Feed | None:
    """The feed of a statistical clause; None without a certificate."""
    metric, limit = DIVERGENCES[clause.metric], clause.at_most
    if limit is None:
        return None
    relative = isinstance(limit, Relative)
    if clause.percentile is not None:
        return None if relative else Feed(limit=share_beyond(clause), threshold=limit)
    low, high = metric.span
    high = high if clause.clip is None else clause.clip
    if low == 0.0 and math.isinf(high) and not relative and limit > 0:
        return Feed(limit=1 / _CUT, scale=_CUT * limit, proves=False)
    if not math.isfinite(high - low):
        return None
    # a sampled value may be negative though its mean cannot
    least = metric.span_of("logits")[0] if "logits" in metric.forms else low
    scale = high - low
    # the limit of a relative clause is known only at judgement
    at = 1.0 if relative else (limit - low) / scale
    return Feed(at, scale, low=low, best=(least - low) / scale)
