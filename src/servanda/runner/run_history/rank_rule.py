# The rank rule: is one of several runs worse than all others, by more than any other run is?
#
# Every run gets a score from the whole set of runs, and the score does not depend on their order.
# So if the newest run is exchangeable with the n others, each of the n + 1 runs is equally likely
# to have the largest score: the newest has it alone with probability at most 1 / (n + 1), and
# exactly that if the largest score is above 0 and no other run has it too.
#
# Axes: R runs, C cells.

from __future__ import annotations

import math
from collections.abc import Sequence


def margin(value: float, others: Sequence[float], floor: float = 0.0) -> float:
    """How far a value is above all others, as a share of the range of all, from 0 to 1.

    Args:
        value, others: larger is worse.
        floor: a distance that is not larger counts as 0.

    >>> margin(5.0, [1.0, 3.0]), margin(2.0, [1.0, 3.0]), margin(3.0, [3.0, 3.0])
    (0.5, 0.0, 0.0)
    >>> margin(5.0, [1.0, 3.0], floor=2.0), margin(4.0, [3.0, 3.0])
    (0.0, 1.0)
    """
    highest = max(others)
    if not value > highest or not value - highest > floor:
        return 0.0
    return 1.0 if math.isinf(value) else (value - highest) / (value - min(others))


def scores(value_RC: Sequence[Sequence[float]], floor_RC: Sequence[Sequence[float]]) -> list[float]:
    """The largest margin of each run over its cells, [R].

    Args:
        value_RC: larger is worse; floor_RC: the noise floor of each value, in its unit.
    """
    return [
        max(
            margin(x, [row[c] for k, row in enumerate(value_RC) if k != r], floor_RC[r][c])
            for c, x in enumerate(value_C)
        )
        for r, value_C in enumerate(value_RC)
    ]


def worse(value_RC: Sequence[Sequence[float]], floor_RC: Sequence[Sequence[float]]) -> bool:
    """Whether the last run has the largest score alone.

    If the runs are exchangeable, the probability is at most 1 / R.
    """
    *others, last = scores(value_RC, floor_RC)
    return last > max(others)
