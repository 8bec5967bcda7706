# Feeds: how the values of a metric become x in [0, 1], and the limit that their mean is held to.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servanda.clauses.base import Array
from servanda.contract import Clause, Relative
from servanda.divergence import DIVERGENCES

_CUT = 20.0  # limits at which the mean of an unbounded metric is cut, to be refuted


@dataclass(frozen=True)
class Feed:
    """x = (value - low) / scale, cut at 1; or whether a value exceeds a threshold.

    Args:
        limit: of the mean of x.
        scale, low: metric units of one x, and of x = 0.
        threshold: a percentile pN at limit L is the promise that at most (100-N) % of the
            tokens exceed L; limit is then that share.
        proves: whether a small mean of x shows a small mean of the metric; not so where the
            metric is cut though the contract does not say `clip`.
    """

    limit: float
    scale: float = 1.0
    low: float = 0.0
    threshold: float | None = None
    proves: bool = True

    def x(self, values_N: Array) -> Array:
        if self.threshold is not None:
            return (values_N > self.threshold).astype(np.float64)
        return np.minimum((values_N - self.low) / self.scale, 1.0)

    def value(self, x: float) -> float:
        """A mean of x in units of the metric."""
        return x * self.scale + self.low

    def x_of(self, value: float) -> float:
        """A mean of the metric as a mean of x."""
        return (value - self.low) / self.scale


def feed_of(clause: Clause) -> Feed | None:
    """The feed of a statistical clause; None where it has no limit of its own to be held to."""
    metric = DIVERGENCES[clause.metric]
    if clause.at_most is None:
        return None
    if clause.percentile is not None:
        if isinstance(clause.at_most, Relative):
            return None
        # 100 - 99.9 carries rounding that nobody wrote
        share = round((100.0 - clause.percentile) / 100.0, 12)
        return Feed(limit=share, threshold=clause.at_most)
    # the limit of a relative clause is known only when it is judged
    limit = 1.0 if isinstance(clause.at_most, Relative) else clause.at_most
    if clause.clip is not None:
        low, high = 0.0, clause.clip
    elif metric.bounded:
        low, high = metric.span
    elif isinstance(clause.at_most, Relative):
        return None
    else:
        return Feed(limit=1 / _CUT, scale=_CUT * limit, proves=False)
    return Feed(limit=(limit - low) / (high - low), scale=high - low, low=low)
