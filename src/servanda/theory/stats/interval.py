# From evidence to an interval, and to how much more evidence would decide; and, before anything
# was measured, how many units an answer takes.

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from servanda.theory.stats.log_moment import NEG, POS, Floats, Process, log_mean_exp

_STEPS = 40  # halvings: the end is known to 2^-40 of [0, 1]


def interval(process: Process, alpha: float) -> tuple[float, float]:
    """Lower and upper bound of the mean, each at confidence 1 - alpha, valid at every look.

    The upper bound is the smallest limit with log_e_below >= log 1/alpha, found from above,
    so that its error is on the safe side; likewise the lower one.
    """
    price = math.log(1 / alpha)
    if not process.n:
        return 0.0, 1.0
    return (
        0.0 if process.log_e_above(0.0) < price else _bisect(process.log_e_above, price, 0.0, 1.0),
        1.0 if process.log_e_below(1.0) < price else _bisect(process.log_e_below, price, 1.0, 0.0),
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


def units_to_decide(growth: Floats, n: int, log_price: float) -> int | None:
    """Units in all at which evidence that goes on growing as it did reaches the price.

    Args:
        growth: log e-value of each mixture component after n units.

    Returns:
        A projection, not a promise; None where the evidence does not grow.
    """
    if n == 0 or growth.max() <= 0:
        return None
    rate = growth / n
    low, high = n, 2 * n
    while log_mean_exp(rate * high) < log_price:
        low, high = high, high * 2
        if high > 1 << 50:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if log_mean_exp(rate * middle) >= log_price else (middle, high)
    return high


def units_at_best(limit: float, alpha: float, best: float = 0.0) -> int | None:
    """Units that `holds` needs even if the two kernels were identical and every unit full.

    Args:
        limit: of the mean, in (0, 1].
        best: what every unit of identical kernels is, in [0, 1).

    Returns:
        None where the limit is not above the best: no sample shows that a mean is there.
    """
    growth = np.log1p(NEG * best) - np.log1p(NEG * limit)
    return units_to_decide(growth, 1, math.log(1 / alpha))


def units_expected(
    limit: float, truth: float, alpha: float, cells: int = 1, best: float = 0.0
) -> int | None:
    """Units at which a mean of `truth` is told from `limit`, if every x is `best` or 1.

    Values of 0 and 1 are the worst case: of all variables in [0, 1] with that mean they
    give the least evidence, on either side, because log(1 + t x) is concave in x.  What is
    returned is where the evidence reaches its price if it grows as it does on average; half
    of the runs need more.

    Args:
        limit: of the mean, in (0, 1).
        truth: the mean, in [0, 1].
        alpha: the chance of a wrong answer.
        cells: how many cells share alpha; the price of a violation, while `holds` is not split.
        best: what a unit of identical kernels is, in [0, 1); the truth is not below it.

    Returns:
        None where the truth is the limit, or the limit 0: no number of units tells them.

    >>> units_expected(0.01, 0.005, 0.05), units_expected(0.01, 0.0, 0.05)
    (3404, 478)
    """
    share = (truth - best) / (1 - best)
    bets = NEG if truth <= limit else POS
    growth = share * np.log1p(bets) + (1 - share) * np.log1p(bets * best)
    growth = growth - np.log1p(bets * limit)
    if truth <= limit:
        return units_to_decide(growth, 1, math.log(1 / alpha))
    return units_to_decide(growth, 1, math.log(max(cells, 1) / alpha))
