"""A row of `benchmarks.speed`: one path beside its peers, timed in turn, round after round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb

Work = Callable[[], object]


def digits(number: float) -> str:
    """Three digits, and all before the point.

    >>> digits(6.089), digits(1234.5)
    ('6.09', '1,234')
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


@dataclass(frozen=True)
class Row:
    """One path beside one peer.

    Args:
        ours, theirs: medians, nanoseconds a unit.
        ratio: median of theirs / ours over the rounds; low, high: its interval.
        unit: of the work, as `pair of logits`.
    """

    path: str
    peer: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {digits(self.ours)} ns a {self.unit}; {self.peer}: "
            f"{digits(self.theirs)}, "
            f"{self.ratio:.3g} times ({self.low:.3g} to {self.high:.3g})"
        )


def beside(
    path: str,
    unit: str,
    units: float,
    ours: Work,
    peers: Mapping[str, Work],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> list[Row]:
    """Time `ours` and each peer in turn, round after round; the first round only warms up."""

    def seconds(work: Work) -> float:
        began = clock()
        work()
        return clock() - began

    timed = [
        (seconds(ours), {name: seconds(peer) for name, peer in peers.items()})
        for _ in range(rounds + 1)
    ][1:]
    rows = []
    for name in peers:
        pairs = [(mine, theirs[name]) for mine, theirs in timed]
        ratio = sorted(their / mine for mine, their in pairs)
        left_out = outer(rounds)
        rows.append(
            Row(
                path,
                name,
                unit,
                statistics.median(mine for mine, _ in pairs) / units * 1e9,
                statistics.median(their for _, their in pairs) / units * 1e9,
                statistics.median(ratio),
                ratio[left_out],
                ratio[-1 - left_out],
            )
        )
    return rows


def outer(n: int) -> int:
    """How many order statistics may be left out at each end: the rest holds the median at 95 %."""
    return max(
        (k for k in range(n // 2) if 2 * sum(comb(n, i) for i in range(k + 1)) <= 0.05 * 2**n),
        default=0,
    )
