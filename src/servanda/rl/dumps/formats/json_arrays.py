# Plain data of JSON as arrays, each strict about its type: a text is no number, null is NaN.

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from servanda.traces.rollouts import Array


class Unusable(ValueError):  # noqa: N818 - a value, not a failure of the program
    """A value of a row that is not what its column holds; the text is the reason."""


def unnested(value: Any) -> Any:
    """A batch of one, however deep it was wrapped: its one element.

    >>> unnested([[[1, 2]]]), unnested([[3]]), unnested("math")
    ([1, 2], [3], 'math')
    """
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value


def scalar(value: Any) -> Any:
    """The one value of a batch of one.

    >>> scalar([[3]]), scalar(3)
    (3, 3)
    """
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def integers(values: Any, name: str) -> Array:
    """int64, [T]; whole floats are no ids."""
    try:
        return np.array(msgspec.convert(values, list[int]), dtype=np.int64)
    except (msgspec.ValidationError, OverflowError):
        raise Unusable(f"{name} are not integers") from None


def floats(values: Any, name: str) -> Array:
    """float64, [T]; null is NaN."""
    try:
        return np.array(msgspec.convert(values, list[float | None]), dtype=np.float64)
    except (msgspec.ValidationError, OverflowError):
        raise Unusable(f"{name} are not numbers") from None


def flags(values: Any, name: str) -> Array:
    """bool, [T], of true and false or of 0 and 1."""
    try:
        array = np.array(msgspec.convert(values, list[bool | float]), dtype=np.float64)
    except (msgspec.ValidationError, OverflowError):
        raise Unusable(f"{name} is neither 0 nor 1 everywhere") from None
    if not np.isin(array, (0.0, 1.0)).all():
        raise Unusable(f"{name} is neither 0 nor 1 everywhere")
    return array == 1.0


def number(value: Any, name: str) -> float:
    """A number; NaN where there is none."""
    value = scalar(value)
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{name} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise Unusable(f"{name} is not a number") from None
