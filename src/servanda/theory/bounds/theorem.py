# A theorem: one function with its assumptions and its source.
#
# Conventions of this package, fixed once.  p is the train kernel's distribution, q that of
# the infer kernel, w = p / q; the tokens come from infer.  `osc` is max - min of the
# difference of two rows of logits (at most twice its largest absolute value; a shift of all
# logits costs nothing).  All computations use float64 and nats.  Arguments may have any shapes that
# broadcast, and a result has their common shape.  NaN, or a number outside the range of a theorem,
# raises an EvidenceError.

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.registry import Registry
from servanda.theory.bounds.assumptions import ASSUMPTIONS

# the guarantee types, for certified inputs: see docs/explanation/chain.md
Standing = Literal["certificate", "fact", "conditional bound", "estimate", "diagnostic"]
DERIVED = "derived in docs/explanation/chain.md"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Theorem:
    """A bound with the information that belongs to its result.

    Args:
        standing: guarantee type of its result, for certified inputs.
        assumes: names in ASSUMPTIONS that the proof needs beyond its inputs.
        sharp: whether some pair of kernels attains it or comes arbitrarily near, at any drift or as
            the drift vanishes, for responses of any length.
        source: source of the statement.
    """

    name: str
    function: Callable[..., Any]
    standing: Standing
    assumes: tuple[str, ...]
    sharp: bool
    source: str

    @property
    def statement(self) -> str:
        """The statement, in one line."""
        return (inspect.getdoc(self.function) or "").split("\n")[0].rstrip(".")


THEOREMS: Registry[Theorem] = Registry("theorem")


def theorem(
    standing: Standing,
    *,
    source: str = DERIVED,
    assumes: tuple[str, ...] = (),
    sharp: bool = False,
) -> Callable[[F], F]:
    """Register a function as a theorem under its name.

    Raises:
        ValueError: it has an assumption that is not in ASSUMPTIONS.
    """

    def decorate(function: F) -> F:
        name = function.__name__
        unknown = [key for key in assumes if key not in ASSUMPTIONS]
        if unknown:
            raise ValueError(f"theorem {name!r} assumes {unknown}, which no one has written down")
        THEOREMS.add(name, Theorem(name, function, standing, assumes, sharp, source))
        return function

    return decorate


# The domain of theorems: float64 numbers within the range of the proof, and sampled tokens of
# ragged sequences, concatenated.


Floats = NDArray[np.float64]

_ROUNDING = 1e-9  # tolerance for sums at the end of a range


def given(
    name: str, value: ArrayLike, low: float = 0.0, high: float = math.inf, hint: str = ""
) -> Floats:
    """The value as float64; values outside the range by rounding are clipped.

    Raises:
        EvidenceError: a value is not in [low, high], or NaN.
    """
    array = np.asarray(value, dtype=np.float64)
    outside = ~((array >= low - _ROUNDING) & (array <= high + _ROUNDING))
    if outside.any():
        found = array[outside].flat[0]
        hint = hint or f"give a known {name} in this range; leave a missing one out"
        raise EvidenceError(f"{name} is {found:g}, outside of [{low:g}, {high:g}]", hint=hint)
    return np.clip(array, low, high)


def product(*factors: ArrayLike) -> Floats:
    """The product of numbers >= 0; 0 if one of them is 0, even if another is infinite."""
    arrays = [np.asarray(factor, dtype=np.float64) for factor in factors]
    nothing = np.any(np.broadcast_arrays(*(array == 0.0 for array in arrays)), axis=0)
    made = np.ones(())
    for array in arrays:
        made = made * np.where(nothing, 0.0, array)
    return made[()]


def log_ratios(log_ratio_N: ArrayLike) -> Floats:
    """Log p - log q of sampled tokens in float64, [N], nats; -inf without mass under train.

    Raises:
        EvidenceError: one is NaN or +inf, although a sampled token has mass.
    """
    numbers_N = np.asarray(log_ratio_N, dtype=np.float64)
    if np.isnan(numbers_N).any() or np.isposinf(numbers_N).any():
        raise EvidenceError(
            "what was sampled has no usable log ratio",
            hint="drop sequences with unusable tokens as missing first",
        )
    return numbers_N


def lengths(length_S: ArrayLike, tokens: int) -> NDArray[np.int64]:
    """The number of tokens of each sequence, [S].

    Raises:
        EvidenceError: the lengths do not add up to the number of tokens.
    """
    length_S = np.asarray(length_S, dtype=np.int64)
    if (length_S < 0).any() or length_S.sum() != tokens:
        raise EvidenceError(
            f"{tokens} tokens for {len(length_S)} sequences of {length_S.sum()} tokens in all",
            hint="give the tokens of all sequences one after another, and each one's length",
        )
    return length_S


def over_sequences(value_N: Floats, length_S: NDArray[np.int64]) -> Floats:
    """The sum over each sequence, [S]; 0 without tokens."""
    n = len(length_S)
    return np.bincount(np.repeat(np.arange(n), length_S), value_N, n).astype(np.float64)
