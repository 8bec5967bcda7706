# Bets: the components of the mixture of LogMoment and GroupRatio, and their weights.
#
# The mean over components with any weights that are fixed before the data is an e-value.  A limit
# is known before the data, so most of the weight goes to bets that grow fast against it: at equal
# weights most components never matter for a given limit, and cost samples.  A small equal part
# remains on all, so that a mean far from what the weights expect costs only its logarithm.

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Never change: they are part of the meaning of an evidence digest.
NEG: Floats = -np.concatenate([np.geomspace(2e-3, 0.9, 14), [0.95, 0.99]])
POS: Floats = np.geomspace(1e-2, 1e6, 33)

_EQUAL = 0.2  # share of the weight that all bets have equally
_BELOW = 0.1  # truths below a limit that are expected: from this fraction of it away, on
_ABOVE = (0.15, 5.0)  # truths above it: from this fraction away to this multiple
_SMOOTH = 10.0  # x of small variance prefers larger bets: up to this number / limit


def log_mean_exp(values: Floats) -> float:
    """log(mean(exp(values))) without overflow."""
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).mean()))


def mixed(growth: Floats, weight: Floats) -> float:
    """The log e-value of the mixture.

    Args:
        growth: log e-values of the components, nats, [J]; weight: their weights, [J], of sum 1.
    """
    top = float(growth.max())
    return top + math.log(float(weight @ np.exp(growth - top)))


@lru_cache(maxsize=1024)
def weights_below(limit: float | None = None, best: float = 0.0) -> Floats:
    """The weights of NEG for evidence that a mean is below a limit, of sum 1.

    Args:
        limit: declared limit of the mean; None, or outside (0, 1): equal weights.
        best: the smallest expected mean: that of identical kernels.
    """
    if limit is None or not best < limit < 1.0 or limit <= 0.0:
        return _weights(NEG)
    # x in {0, 1} of a mean near the limit prefers the smallest bets, all other x larger ones
    return _weights(NEG, (_optimal(limit - _BELOW * (limit - best), limit), -1.0))


@lru_cache(maxsize=1024)
def weights_above(limit: float | None = None, best: float = 0.0) -> Floats:
    """The weights of POS for evidence that a mean is above a limit; see `weights_below`."""
    if limit is None or not best < limit < 1.0 or limit <= 0.0:
        return _weights(POS)
    away = limit - best
    near = _optimal(min(limit + _ABOVE[0] * away, (1 + 3 * limit) / 4), limit)
    far = _optimal(min(limit + _ABOVE[1] * away, (1 + limit) / 2), limit)
    return _weights(POS, (near, far), (near, max(far, _SMOOTH / limit)))


def _optimal(mean: float, limit: float) -> float:
    """The bet of the fastest growth if x is 0 or 1."""
    return (mean - limit) / (limit * (1 - mean))


def _weights(bets: Floats, *ranges: tuple[float, float]) -> Floats:
    """Equal weights on all bets, and equal parts of the rest on those in each range."""
    size = np.abs(bets)
    weight = np.full(len(bets), _EQUAL if ranges else 1.0) / len(bets)
    for ends in ranges:
        low, high = sorted(map(abs, ends))
        inside = (size >= low) & (size <= high)
        if not inside.any():
            inside = np.arange(len(bets)) == np.abs(np.log(size / low)).argmin()
        weight += (1 - _EQUAL) / len(ranges) * inside / inside.sum()
    weight.setflags(write=False)  # it is cached
    return weight
