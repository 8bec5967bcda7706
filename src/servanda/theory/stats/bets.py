# Bets: the components of the mixture of LogMoment and GroupRatio, and their weights.
#
# The mean over components with any weights that are fixed before the data is an e-value.  A limit
# is known before the data, so most of the weight goes to bets that grow fast against it: at equal
# weights most components never matter for a given limit, and cost samples.  A small equal part
# remains on all, so that a mean far from what the weights expect costs only its logarithm.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Never change: they are part of the meaning of an evidence digest.
NEG: Floats = -np.concatenate([np.geomspace(2e-3, 0.9, 14), [0.95, 0.99]])
POS: Floats = np.geomspace(1e-2, 1e6, 33)

_EQUAL = 0.2  # share of the weight that all bets have equally
_BELOW = 0.1  # truths below a limit that are expected: from this fraction of it away, on
_ABOVE = (0.15, 5.0)  # truths above it: from this fraction away to this multiple
_SMOOTH = (0.03, 3.0)  # bets / limit that x of small variance prefers, whose mean is above it
_SMOOTH_SHARE = 0.4  # of the weight that is not equal


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
    return _weights(NEG, (1.0, _optimal(limit - _BELOW * (limit - best), limit), -1.0))


@lru_cache(maxsize=1024)
def weights_above(limit: float | None = None, best: float = 0.0) -> Floats:
    """The weights of POS for evidence that a mean is above a limit; see `weights_below`."""
    if limit is None or not best < limit < 1.0 or limit <= 0.0:
        return _weights(POS)
    away = limit - best
    near = _optimal(min(limit + _ABOVE[0] * away, (1 + 3 * limit) / 4), limit)
    far = _optimal(min(limit + _ABOVE[1] * away, (1 + limit) / 2), limit)
    smooth = _SMOOTH_SHARE, _SMOOTH[0] / limit, _SMOOTH[1] / limit
    return _weights(POS, (1 - _SMOOTH_SHARE, near, far), smooth)


def _optimal(mean: float, limit: float) -> float:
    """The bet of the fastest growth if x is 0 or 1."""
    return (mean - limit) / (limit * (1 - mean))


def _weights(bets: Floats, *ranges: tuple[float, float, float]) -> Floats:
    """Equal weights on all bets, and of the rest a share on those from one end to another."""
    size = np.abs(bets)
    weight = np.full(len(bets), _EQUAL if ranges else 1.0) / len(bets)
    for share, *ends in ranges:
        low, high = sorted(map(abs, ends))
        inside = (size >= low) & (size <= high)
        if not inside.any():
            inside = np.arange(len(bets)) == np.abs(np.log(size / low)).argmin()
        weight += (1 - _EQUAL) * share * inside / inside.sum()
    weight.setflags(write=False)  # it is cached
    return weight


# Refutation: evidence that can only reject.
#
# Each alternative to a hypothesis is a product of factors, one per token, whose mean given
# everything earlier is at most 1 under the hypothesis.  So is the mean of the products, at all
# evaluations simultaneously (Ville).  A lost token is charged the smallest possible factor: for any
# reason of the loss, the product is then smaller.


LEAK = 0.05  # share of 1 (the hypothesis itself) in every factor, so none is smaller than this
SLACK = 1e-6  # smallest error, nats: logprobs may have been float32 before they were recorded
R = TypeVar("R", bound="Refutation")


@dataclass(frozen=True)
class Refutation:
    """Evidence against a hypothesis; `+` adds later closed rounds.

    Args:
        n: tokens with a value; missing: dispatched tokens without one.
        growth: log of each alternative's product, nats; () without data.
    """

    n: int = 0
    growth: tuple[float, ...] = ()
    missing: int = 0

    def __add__(self: R, other: Refutation) -> R:
        parts = [growth for growth in (self.growth, other.growth) if growth]
        return replace(
            self,
            n=self.n + other.n,
            # a round may lack the last alternatives, which count as no bet
            growth=tuple(map(math.fsum, zip_longest(*parts, fillvalue=0.0))),
            missing=self.missing + other.missing,
        )

    @property
    def log_e(self) -> float:
        """Evidence against the hypothesis, in nats."""
        return log_mean_exp(np.array(self.growth)) if self.n else -math.inf


# shares of requests that are (sampled as reported, by one of two opposite faults each)
_MIXED = ((0.0, 0.5), (0.8, 0.1))


def by_request(
    log_JN: Floats, opposite: Sequence[tuple[int, int]], request_N: NDArray[np.int64]
) -> Floats:
    """Log factors against samplers that differ from request to request, one per mixture.

    Over all tokens two opposite faults cancel.  Of one request the mean of two alternatives'
    products, and of 1, has a mean of at most 1 as they have, and so has its product over requests.

    Args:
        log_JN: log factor of each alternative at each token, nats.
        opposite: pairs of alternatives.
        request_N: the request of each token, ascending.

    >>> by_request(np.log([[2.0, 0.5], [0.5, 2.0]]), [(0, 1)], np.array([0, 1])).round(3).tolist()
    [0.446, 0.098]
    """
    if not len(request_N):
        return np.zeros(len(_MIXED) * len(opposite))
    start_S = np.flatnonzero(np.diff(request_N, prepend=request_N[0] - 1))
    sums_JS = np.add.reduceat(log_JN, start_S, axis=1)
    one_PS, other_PS = (sums_JS[list(which)] for which in zip(*opposite, strict=True))
    both_PS = np.logaddexp(one_PS, other_PS)
    growth = []
    for right, faulty in _MIXED:
        mixed_PS = both_PS + math.log(faulty)
        if right:
            mixed_PS = np.logaddexp(mixed_PS, math.log(right))
        growth.append(mixed_PS.sum(axis=1))
    return np.concatenate(growth)


# Coherence: tests whether the two logprobs can be those of two distributions, with samples from
# infer's.
#
# E_infer w is the train kernel's mass on tokens that infer can sample, w = p / q: never above 1,
# for any two kernels.  So 1 + t (min(w, C) - 1) has a mean of at most 1 for every t in [0, 1], and
# the products over tokens can only reject.  A mean of w *below* 1 is no evidence: weights are
# skewed, and most samples are below their mean.
#
# It detects raw logprobs on infer with processed ones on train, logprobs of other tokens, and
# probabilities that add up to more than 1.  It does not detect another temperature of train: that
# is another distribution, which `tv` measures.
#
# Recorded weights differ from the kernels' own: rounding both logprobs changes log w by at most the
# sum of their two errors.  Each weight is taken at its lower end, so that a coarse record of
# correct kernels is not rejected.


CAP = 10.0  # cap of w, so that no single token can reject
_BETS: Floats = np.geomspace(0.01, 0.99, 16)


@dataclass(frozen=True)
class Coherence(Refutation):
    """Evidence that E_infer w > 1."""

    @classmethod
    def of(
        cls,
        log_ratio_N: Floats,
        missing: int = 0,
        error_N: Floats | float = 0.0,
        count_N: Floats | None = None,
    ) -> Coherence:
        """From one closed round of log-ratios log p - log q, nats, in dispatch order.

        Args:
            log_ratio_N: -inf without mass under train; neither NaN nor +inf.
            missing: dispatched tokens without a value: each is charged w = 0.
            error_N: rounding error bound of each log-ratio, nats; see `precision.errors`.
            count_N: number of tokens with each log-ratio; default one.

        Source:
            I. Waudby-Smith, A. Ramdas, Estimating means of bounded random variables by betting,
            2024; the cap and the bets are ours.
        """
        growth_JN = growths(log_ratio_N - np.maximum(error_N, SLACK))
        count_N = np.ones(growth_JN.shape[1]) if count_N is None else count_N
        sums = growth_JN @ count_N
        sums += missing * np.log1p(-_BETS)
        return cls(int(count_N.sum()), tuple(sums.tolist()), missing)


def growths(least_N: Floats) -> Floats:
    """The growth of each bet by one token, [bets, N], from the lower end of its log-ratio."""
    weight_N = np.minimum(np.exp(np.minimum(least_N, np.log(CAP))), CAP)
    return np.log1p(_BETS[:, None] * (weight_N - 1))
