# Steps: the limits that people write, numbers of two significant digits, in their order.

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal

_PER_DECADE = 90  # 10, 11, ... 99
LOWEST = -12 * _PER_DECADE  # 1e-11: no limit is smaller


def value(step: int) -> float:
    """The number of a step; each is the float that its two digits are read as.

    >>> value(0), value(89), value(-1), value(-2 * 90 + 5)
    (10.0, 99.0, 9.9, 0.15)
    """
    return float(f"{10 + step % _PER_DECADE}e{step // _PER_DECADE}")


def at_or_above(x: float) -> int:
    """The first step that is not below a positive number.

    >>> [value(at_or_above(x)) for x in (0.0123, 0.012, 0.0991, 7.0)]
    [0.013, 0.012, 0.1, 7.0]
    """
    exact = Decimal(repr(x))
    exponent = exact.adjusted() - 1
    digits = math.ceil(exact.scaleb(-exponent))
    return exponent * _PER_DECADE + digits - 10  # 100 is the first of the next decade


def first(low: int, high: int, accepts: Callable[[float], bool]) -> int | None:
    """The first step in [low, high] whose number meets what all larger ones meet, or None."""
    if low > high or not accepts(value(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(value(middle)) else (middle + 1, high)
    return high
