# What goes into a bound: numbers in their range, and sampled tokens by sequence.

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError

Floats = NDArray[np.float64]


def within(
    values: ArrayLike,
    name: str,
    low: float = 0.0,
    high: float = math.inf,
    *,
    endless: bool = False,
    hint: str = "",
) -> Floats:
    """The values in float64, each at least `low` and at most `high`.

    Args:
        endless: whether a value may be inf, where `high` is.

    Raises:
        EvidenceError: some value lies outside, or is NaN: what is absent has no bound.
    """
    numbers = np.asarray(values, dtype=np.float64)
    good = (numbers >= low) & (numbers <= high) & (endless | ~np.isposinf(numbers))
    if not good.all():
        close = "]" if endless or math.isfinite(high) else ")"
        found = float(numbers[~good].flat[0])
        raise EvidenceError(f"{name} is {found:g}; it lies in [{low:g}, {high:g}{close}", hint=hint)
    return numbers


def sampled_log_ratios(log_ratio_N: ArrayLike) -> Floats:
    """Log p - log q of sampled tokens in float64, [N], nats; -inf where train gives no mass.

    Raises:
        EvidenceError: one is NaN or +inf: a token that was drawn had mass.
    """
    numbers_N = np.asarray(log_ratio_N, dtype=np.float64)
    if np.isnan(numbers_N).any() or np.isposinf(numbers_N).any():
        raise EvidenceError(
            "a sampled token has no usable log ratio",
            hint="drop unusable sequences as missing first",
        )
    return numbers_N


def sequence_of_token(log_ratio_N: Floats, length_S: ArrayLike) -> NDArray[np.int64]:
    """Which sequence each token belongs to, [N]; tokens of all sequences follow one another.

    Raises:
        EvidenceError: the lengths do not add up to the number of tokens.
    """
    length_S = np.asarray(length_S, dtype=np.int64)
    if (length_S < 0).any() or length_S.sum() != len(log_ratio_N):
        raise EvidenceError(
            f"{len(log_ratio_N)} tokens for {len(length_S)} sequences of {length_S.sum()} tokens",
            hint="give the tokens of all sequences one after another, and each one's length",
        )
    return np.repeat(np.arange(len(length_S)), length_S)
