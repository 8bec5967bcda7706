# Reach: the effect sizes that nine of ten runs of a given size decide (power).
#
# The growth of LogMoment and GroupRatio has a closed form in the two extreme cases of a mean: all
# of x in {0, 1}, or all of x equal to the mean.  log is concave, so of all x in [0, 1] with the
# same mean the former grows least, in both directions, and varies most.  There the growth depends
# on the number of ones alone, whose quantile decides in how many runs it suffices.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.bets import NEG, POS, Floats, mixed, weights_above, weights_below

POWER = 0.9  # share of the runs that decide at an edge
Z = 1.2815515655446004  # its normal quantile
_STEPS = 50  # bisection steps in [0, 1]


@dataclass(frozen=True)
class Reach:
    """The means of x that n units decide against a limit in POWER of all runs.

    Args:
        holds: the largest mean shown to be below the limit, if every x is 0 or 1.
        violated: the smallest mean shown to be above it, if every x is 0 or 1.
        holds_even, violated_even: the same if every x is the mean.

    None: no mean is.
    """

    holds: float | None
    violated: float | None
    holds_even: float | None
    violated_even: float | None


def reach(
    n: int, limit: float, *, alpha: float, cells: int, fill: float = 1.0, best: float = 0.0
) -> Reach:
    """The means that n units decide.

    Args:
        n: units of the slice: tokens, or prompt groups.
        limit: limit of the mean of x, in (0, 1).
        alpha: error probability of `holds`; that of `violated` is alpha / cells.
        fill: tokens of a prompt group divided by its capacity; 1 if the units are tokens.  x is
            taken as equal for all tokens of a group, which is the worst dependence.
        best: the smallest expected mean, which the weights of the bets depend on.
    """
    holds, violated = log_price(alpha), log_price(shared(alpha, cells))

    def below(mean: float, even: bool) -> bool:
        mean = mean if even else unlucky(mean, n, 1)
        growth = _growth(NEG, mean, limit, fill, even=even)
        return mixed(n * growth, weights_below(limit, best)) >= holds

    def above(mean: float, even: bool) -> bool:
        mean = mean if even else unlucky(mean, n, -1)
        growth = _growth(POS, mean, limit, fill, even=even)
        return mixed(n * growth, weights_above(limit, best)) >= violated

    return Reach(
        _edge(lambda m: below(m, False), 0.0, 1.0),
        _edge(lambda m: above(m, False), 1.0, 0.0),
        _edge(lambda m: below(m, True), 0.0, 1.0),
        _edge(lambda m: above(m, True), 1.0, 0.0),
    )


def unlucky(mean: float, n: float, sign: int) -> float:
    """The share of ones that n units of a mean do not exceed (sign 1) with probability POWER.

    Args:
        sign: -1: the share that they reach.

    Source:
        E. A. Cornish, R. A. Fisher, Moments and cumulants, 1938: the first correction of the
        normal quantile of a binomial count, which is then rounded to the side that is safe.

    >>> unlucky(0.0, 100, 1), unlucky(0.1, 100, 1), unlucky(0.1, 100, -1)
    (0.0, 0.14, 0.06)
    """
    if not 0 < mean < 1 or n <= 0:
        return mean
    spread = Z * math.sqrt(n * mean * (1 - mean))
    skew = (Z**2 - 1) / 6 * (1 - 2 * mean)
    count = n * mean + skew + sign * (spread - 0.5)
    count = math.ceil(count) if sign > 0 else math.floor(count)
    return min(max(count / n, 0.0), 1.0)


def _growth(bets: Floats, mean: float, limit: float, fill: float, *, even: bool) -> Floats:
    """The expected growth of each component by one unit, nats."""
    low, middle, high = (np.log1p(bets * (limit + fill * (x - limit))) for x in (0.0, mean, 1.0))
    growth = middle if even else mean * high + (1 - mean) * low
    return growth - np.log1p(bets * limit)


def _edge(decides: Callable[[float], bool], inside: float, outside: float) -> float | None:
    """The last decided mean on the way from `inside` to `outside`; None if there is none."""
    if not decides(inside):
        return None
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if decides(middle) else (inside, middle)
    return inside
