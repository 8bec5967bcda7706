# Multiplicity: error control over many hypotheses.
#
# A promotion that needs every slice to hold needs no split of alpha: if one slice exceeds its
# limit, its own test must err.  Decisions per slice, per attempt or per step need one, defined
# here.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.log_moment import Floats


def e_bh(log_e_K: Floats | Sequence[float], alpha: float) -> NDArray[np.bool_]:
    """The rejected ones of K hypotheses, with a false discovery rate of at most alpha.

    The k largest e-values are rejected for the largest k whose smallest one is K / (alpha k) or
    more.  For any dependence, the false discovery rate is at most alpha * (true hypotheses) / K, if
    all are read at one stopping time.

    Args:
        log_e_K: log e-value against each hypothesis, nats, [K]; -inf without evidence.
        alpha: the false discovery rate, in (0, 1).

    Returns:
        [K], True if rejected.

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


def attempt_alpha(alpha: float, attempt: int) -> float:
    """The share of alpha of an attempt; all attempts together use alpha once.

    1 / (r (r + 1)) adds up to 1 over r = 1, 2, ...: repeated attempts do not increase the error.

    Raises:
        ValueError: the first attempt is 1.
    """
    return alpha / _telescope(attempt, "attempt")


def step_alpha(alpha: float, step: int) -> float:
    """The share of alpha of one training step; a run of any length uses alpha once.

    If alpha is the long-run share of wrong steps instead, each step uses all of it.

    Raises:
        ValueError: the first step is 1.
    """
    return alpha / _telescope(step, "step")


def slice_alpha(alpha: float, slices: int) -> float:
    """The share of alpha of each slice, if slices are promoted individually.

    It bounds the probability of any wrong promotion by alpha; `e_bh` is weaker, and bounds the
    expected share of wrong ones.

    Raises:
        ValueError: no slice.
    """
    if slices < 1:
        raise ValueError(f"alpha is shared by at least one slice, not by {slices}")
    return alpha / slices


def _telescope(number: int, noun: str) -> int:
    if number < 1:
        raise ValueError(f"the first {noun} is number 1, not {number}")
    return number * (number + 1)
