# What is decided slice by slice: the false discovery rate of e-values, and alpha shared by all.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import Floats


def e_bh(log_e_K: Floats | Sequence[float], alpha: float) -> NDArray[np.bool_]:
    """Which of K hypotheses are rejected; of those, at most alpha are true, on average.

    The k largest e-values are rejected for the largest k whose smallest one is K / (alpha k)
    or more.  Whatever the dependence between them, the false discovery rate is at most
    alpha * (true hypotheses) / K, if all are read at one stopping time.

    Args:
        log_e_K: log e-value against each hypothesis, nats, [K]; -inf where there is no evidence.
        alpha: the false discovery rate, in (0, 1).

    Returns:
        [K], True where rejected.

    Raises:
        EvidenceError: an e-value is NaN.

    Source:
        R. Wang and A. Ramdas, False discovery rate control with e-values, JRSS B 2022.

    >>> e_bh([math.log(60), math.log(45), 0.0], 0.05).tolist()
    [True, True, False]
    """
    log_e_K = np.asarray(log_e_K, dtype=np.float64)
    if np.isnan(log_e_K).any():
        raise EvidenceError(f"the e-value of hypothesis {int(np.isnan(log_e_K).argmax())} is NaN")
    if not log_e_K.size:
        return np.zeros(0, dtype=bool)
    rank_K = np.arange(1, log_e_K.size + 1)
    price_K = math.log(log_e_K.size / alpha) - np.log(rank_K)
    paid = np.flatnonzero(np.sort(log_e_K)[::-1] >= price_K)
    return log_e_K >= price_K[paid[-1]] if paid.size else np.zeros(log_e_K.size, dtype=bool)


def slice_alpha(alpha: float, slices: int) -> float:
    """What each of so many slices may spend where every slice is promoted on its own.

    With it no slice at all is promoted wrongly, but for a chance of alpha; `e_bh` asks for
    less, and bounds the share of the wrong ones.

    Raises:
        ValueError: there is no slice.
    """
    if slices < 1:
        raise ValueError(f"alpha is shared by at least one slice, not by {slices}")
    return alpha / slices
