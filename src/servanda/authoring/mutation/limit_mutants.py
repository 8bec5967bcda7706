# Moving: a limit twice as wide, and half as wide.
#
# A number near the top of its range is moved by its distance to the top: twice 0.999 would say
# nothing, and 0.998 lets twice as much through.

from __future__ import annotations

import math
from collections.abc import Iterator

FACTOR = 2.0
FROM_ZERO = 1e-3  # what a limit of 0 becomes, in its own unit: no multiple of 0 is another limit


def raised(x: float, *, top: float = math.inf) -> Iterator[float]:
    """Larger limits, the preferred one first; all below `top`.

    >>> list(raised(0.03, top=1.0)), list(raised(0.999, top=1.0)), list(raised(3.0))
    ([0.06, 0.515], [0.9995], [6.0])
    """
    if x == 0:
        yield FROM_ZERO
    elif x < 0:
        yield _clean(x / FACTOR)
    elif x * FACTOR < top and not x > top / 2:
        yield _clean(x * FACTOR)
    if 0 < x < top < math.inf:
        yield _clean(top - (top - x) / FACTOR)


def lowered(x: float, *, top: float = math.inf, least: float = 0.0) -> Iterator[float]:
    """Smaller limits, the preferred one first; none of 0, nor below `least`.

    >>> list(lowered(0.03, top=1.0)), list(lowered(0.999, top=1.0)), list(lowered(3.0, least=2.0))
    ([0.015], [0.998, 0.4995], [2.5])
    """
    if x < 0:
        yield _clean(x * FACTOR)
        return
    if top / 2 < x < top:
        yield _clean(top - (top - x) * FACTOR)
    if x / FACTOR > least:
        yield _clean(x / FACTOR)
    elif x > least:
        yield _clean((x + least) / 2)


def _clean(x: float) -> float:
    """Without the rounding of 1 - 0.999, which nobody wrote."""
    return float(f"{x:.12g}")
