# What a theorem accepts: numbers of float64 within the range where its proof speaks.

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError

Floats = NDArray[np.float64]

_ROUNDING = 1e-9  # a sum that should end at a border may miss it


def given(
    name: str, value: ArrayLike, low: float = 0.0, high: float = math.inf, hint: str = ""
) -> Floats:
    """The value as float64; what misses a border by rounding is put on it.

    Raises:
        EvidenceError: some of it is not in [low, high], or is no number.
    """
    array = np.asarray(value, dtype=np.float64)
    outside = ~((array >= low - _ROUNDING) & (array <= high + _ROUNDING))
    if outside.any():
        found = array[outside].flat[0]
        raise EvidenceError(f"{name} is {found:g}, outside of [{low:g}, {high:g}]", hint=hint)
    return np.clip(array, low, high)


def product(*factors: ArrayLike) -> Floats:
    """Of numbers >= 0; 0 wherever one of them is, beside an endless one too."""
    arrays = [np.asarray(factor, dtype=np.float64) for factor in factors]
    nothing = np.any(np.broadcast_arrays(*(array == 0.0 for array in arrays)), axis=0)
    made = np.ones(())
    for array in arrays:
        made = made * np.where(nothing, 0.0, array)
    return made[()]
