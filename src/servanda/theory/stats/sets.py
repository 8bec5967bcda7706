# Sets of ids defined by earlier text: tests their frequency against their mass.
#
# Let m be the reported mass of such a set at a position, and r the odds by which a sampler favours
# it: the sampled token is then in the set with probability r m / (1 + (r - 1) m).  The ratio of
# that to m is a factor with a mean of 1 if the token is sampled as reported, for any set defined by
# earlier text.  A presence penalty of x nats is r = exp(-x).
#
# Each mass is taken at the end of its rounding interval that makes the factor smallest.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import LEAK, Floats

ODDS: Floats = np.array([0.02, 0.4, 0.6, 0.75, 0.86, 0.93, 1.08, 1.16, 1.33, 1.7, 2.5])


def log_bets(low_N: Floats, high_N: Floats, hit_N: NDArray[np.bool_]) -> Floats:
    """Log factor of each odds at each token, [R, N].

    Args:
        low_N, high_N: bounds of the reported mass of the set.
        hit_N: whether the sampled token is in it.

    >>> np.round(log_bets(np.array([0.5]), np.array([0.5]), np.array([True]))[-1], 2).tolist()
    [0.34]
    """
    odds_R1 = ODDS[:, None]
    mass_RN = np.where(odds_R1 < 1, low_N, np.minimum(high_N, 1.0))
    factor_RN = np.where(hit_N, odds_R1, 1.0) / (1 + (odds_R1 - 1) * mass_RN)
    return np.log((1 - LEAK) * factor_RN + LEAK)
