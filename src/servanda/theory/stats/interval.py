# From evidence to an interval, and to the further evidence needed for a decision; and, before any
# measurement, the number of units for a decision.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.bets import NEG, POS, Floats, mixed, weights_above, weights_below
from servanda.theory.stats.log_moment import Process
from servanda.theory.stats.reachable import unlucky

_STEPS = 40  # bisection steps: the precision is 2^-40


def interval(
    process: Process, alpha: float, about: float | None = None, best: float = 0.0
) -> tuple[float, float]:
    """Lower and upper bound of the mean, each an anytime-valid bound at confidence 1 - alpha.

    The upper bound is the smallest limit with log_e_below >= log 1/alpha, searched from above, so
    that its error is on the safe side; likewise the lower one.

    Args:
        about, best: the declared limit and the smallest expected mean, which choose the weights
            of the bets: the interval then excludes that limit exactly if the evidence does.
    """
    price = log_price(alpha)
    if not process.n:
        return 0.0, 1.0

    def below(limit: float) -> float:
        return process.log_e_below(limit, weights_below(about, best))

    def above(limit: float) -> float:
        return process.log_e_above(limit, weights_above(about, best))

    return (
        0.0 if above(0.0) < price else _bisect(above, price, 0.0, 1.0),
        1.0 if below(1.0) < price else _bisect(below, price, 1.0, 0.0),
    )


def _bisect(log_e: Callable[[float], float], price: float, proved: float, open_: float) -> float:
    """Move `proved` towards `open_` for as long as the e-value is past the threshold."""
    for _ in range(_STEPS):
        middle = (proved + open_) / 2
        if log_e(middle) >= price:
            proved = middle
        else:
            open_ = middle
        if abs(proved - open_) < 1e-9 + 1e-5 * max(proved, open_):
            break
    return proved


def units_to_decide(growth: Floats, weight: Floats, n: int, log_price: float) -> int | None:
    """Total units at which evidence reaches the threshold if it keeps its growth rate.

    Args:
        growth: log e-value of each mixture component after n units; weight: their weights.

    Returns:
        A projection, not a guarantee; None if the evidence does not grow.
    """
    if n == 0 or growth.max() <= 0:
        return None
    rate = growth / n
    low, high = n, 2 * n
    while mixed(rate * high, weight) < log_price:
        low, high = high, high * 2
        if high > 1 << 50:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if mixed(rate * middle, weight) >= log_price else (middle, high)
    return high


def units_at_best(limit: float, alpha: float, best: float = 0.0) -> int | None:
    """Units that `holds` needs even for identical kernels and full units.

    Args:
        limit: limit of the mean, in (0, 1].
        best: value of a unit of identical kernels, in [0, 1).

    Returns:
        None if the limit is not above `best`: no sample can show it.
    """
    growth = np.log1p(NEG * best) - np.log1p(NEG * limit)
    return units_to_decide(growth, weights_below(limit, best), 1, log_price(alpha))


def units_expected(
    limit: float, truth: float, alpha: float, cells: int = 1, best: float = 0.0
) -> int | None:
    """Units at which a mean of `truth` is distinguished from `limit`, if every x is `best` or 1.

    Values of 0 and 1 are the worst case: of all variables in [0, 1] with that mean they give the
    least evidence, on either side, because log(1 + t x) is concave in x.  One run in ten needs
    more units.

    Args:
        limit: limit of the mean, in (0, 1).
        truth: the true mean, in [0, 1].
        alpha: the error probability.
        cells: number of cells that share alpha, for violations; `holds` is not split.
        best: value of a unit of identical kernels, in [0, 1); not above the truth.

    Returns:
        None if the truth equals the limit, or the limit is 0: no number of units suffices.

    >>> units_expected(0.01, 0.005, 0.05), units_expected(0.01, 0.0, 0.05)
    (5468, 402)
    """
    if truth == limit or limit == 0:
        return None
    share, below = (truth - best) / (1 - best), truth < limit
    bets, weigh = (NEG, weights_below) if below else (POS, weights_above)
    weight, price = weigh(limit, best), log_price(alpha if below else shared(alpha, cells))

    def decides(n: int) -> bool:
        ones = unlucky(share, n, 1 if below else -1)
        growth = ones * np.log1p(bets) + (1 - ones) * np.log1p(bets * best)
        return mixed(n * (growth - np.log1p(bets * limit)), weight) >= price

    low, high = 0, 1
    while not decides(high):
        low, high = high, high * 2
        if high > 1 << 50:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
