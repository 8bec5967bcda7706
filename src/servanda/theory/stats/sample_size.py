# How many units an answer takes, before anything was measured: a projection.

from __future__ import annotations

import math

import numpy as np

from servanda.theory.stats.interval import units_to_decide
from servanda.theory.stats.log_moment import NEG, POS


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
