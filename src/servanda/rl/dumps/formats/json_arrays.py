# JSON data as arrays with strict types: a string is no number, null is NaN.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from servanda.traces.rollouts import Array


class Unusable(ValueError):  # noqa: N818 - a value, not a failure of the program
    """A value of a row with a wrong type; the text is the reason."""


def require(values: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if values.get(name) is None:
            raise Unusable(f"{name} is missing")


def unnested(value: Any) -> Any:
    """The single element of a batch of one, however deeply nested.

    >>> unnested([[[1, 2]]]), unnested([[3]]), unnested("math")
    ([1, 2], [3], 'math')
    """
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value


def scalar(value: Any) -> Any:
    """The single value of a batch of one.

    >>> scalar([[3]]), scalar(3)
    (3, 3)
    """
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def _converted(value: Any, kind: Any, reason: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        raise Unusable(reason) from None


def integers(values: Any, name: str) -> Array:
    """int64, [T]; whole floats are no ids."""
    reason = f"{name} are not integers"
    try:
        return np.array(_converted(values, list[int], reason), dtype=np.int64)
    except OverflowError:
        raise Unusable(reason) from None


def floats(values: Any, name: str) -> Array:
    """float64, [T]; null is NaN."""
    reason = f"{name} are not numbers"
    return np.array(_converted(values, list[float | None], reason), dtype=np.float64)


def flags(values: Any, name: str) -> Array:
    """bool, [T], of true and false or of 0 and 1."""
    reason = f"{name} is neither 0 nor 1 everywhere"
    array = np.array(_converted(values, list[bool | float], reason), dtype=np.float64)
    if not np.isin(array, (0.0, 1.0)).all():
        raise Unusable(reason)
    return array == 1.0


def number(value: Any, name: str) -> float:
    """A number; NaN if missing."""
    value = _converted(scalar(value), float | None, f"{name} is not a number")
    return float("nan") if value is None else value
