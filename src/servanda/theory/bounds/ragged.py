# Sampled tokens of many sequences, one sequence after another, each as long as it is.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.theory.bounds.domain import Floats


def log_ratios(log_ratio_N: ArrayLike) -> Floats:
    """Log p - log q of what was sampled in float64, [N], nats; -inf where train gives no mass.

    Raises:
        EvidenceError: one is NaN or +inf: what was drawn had mass.
    """
    numbers_N = np.asarray(log_ratio_N, dtype=np.float64)
    if np.isnan(numbers_N).any() or np.isposinf(numbers_N).any():
        raise EvidenceError(
            "what was sampled has no usable log ratio",
            hint="drop sequences with unusable tokens as missing first",
        )
    return numbers_N


def lengths(length_S: ArrayLike, tokens: int) -> NDArray[np.int64]:
    """How many tokens each sequence has, [S].

    Raises:
        EvidenceError: the lengths do not add up to so many tokens.
    """
    length_S = np.asarray(length_S, dtype=np.int64)
    if (length_S < 0).any() or length_S.sum() != tokens:
        raise EvidenceError(
            f"{tokens} tokens for {len(length_S)} sequences of {length_S.sum()} tokens in all",
            hint="give the tokens of all sequences one after another, and each one's length",
        )
    return length_S


def over_sequences(value_N: Floats, length_S: NDArray[np.int64]) -> Floats:
    """The sum over each sequence, [S]; 0 where it has no token."""
    n = len(length_S)
    return np.bincount(np.repeat(np.arange(n), length_S), value_N, n).astype(np.float64)
