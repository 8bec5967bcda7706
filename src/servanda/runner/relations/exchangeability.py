# Exchangeability: whether two ways to run the same requests give the same numbers up to noise.
#
# An exact test: under the hypothesis the runs of a request are exchangeable, so the statistic of
# the true labels is as likely to be the largest as that of any other labelling.
# Axes: K requests, R runs of a request, the first half of one way, F numbers of a run.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servanda.theory.sampling import uniforms
from servanda.theory.stats.bets import Floats

LABELLINGS = 1999  # random ones; the smallest p-value is 1 / (LABELLINGS + 1)
_TIE = 1e-9


def exchangeability(runs_K: Sequence[Floats], seed: int = 0, rounds: int = LABELLINGS) -> float:
    """The p-value of "the first half of the runs is distributed as the second half".

    The statistic adds up, over requests and numbers, the distance of the two means in units of
    the number's own spread.  Randomisation is part of the p-value, which is valid for any number
    of labellings: Phipson and Smyth, Permutation p-values should never be zero, 2010.

    Args:
        runs_K: of each request its runs, [R, F]; R is even, and F may differ between requests.

    Returns:
        In (0, 1]; 1 where no number varies.

    Raises:
        ValueError: an odd number of runs.

    >>> exchangeability([np.zeros((4, 3))])
    1.0
    """
    statistic = np.zeros(rounds + 1)
    for k, runs_RF in enumerate(runs_K):
        n = len(runs_RF)
        if n % 2:
            raise ValueError(f"{n} runs are no two halves")
        center_RF = runs_RF - np.median(runs_RF, axis=0)
        spread_F = np.abs(center_RF).mean(axis=0)
        unit_RF = center_RF[:, spread_F > 0] / spread_F[spread_F > 0]
        keys_LR = uniforms(seed, "permutation", k, rounds * n).reshape(rounds, n)
        order_LR = np.concatenate([np.arange(n)[None], keys_LR.argsort(axis=1)])
        sign_LR = np.where(order_LR < n // 2, 2.0 / n, -2.0 / n)
        statistic += np.abs(sign_LR @ unit_RF).sum(axis=1)
    least = statistic[0] - _TIE * (1 + abs(statistic[0]))
    return float((statistic >= least).mean())
