# Drawings of the page: the evidence of a slice over time, and who serves it.  Plain SVG, sized by
# attributes alone, for the page allows itself no inline style.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from servanda.gateway.controller.status import CellStatus, SliceStatus
from servanda.gateway.controller.web.phrases import returns
from servanda.report.format import percent

WIDTH, HEIGHT = 132, 30  # of the evidence's drawing, px
_TOP, _LEAST_S = 1.25, 60.0  # fractions of the price that fit; the shortest time on the axis
_POINTS = 120


@dataclass(frozen=True)
class Spark:
    """Evidence as a fraction of its price; the price is the dashed line.

    Args:
        points: of the line, for a polyline; last: its end; price: the height of the line.
        back: height of the evidence for coming back; None where the slice has not left.
        says: the same in words.
    """

    points: str
    last: tuple[float, float] | None
    price: float
    back: float | None
    says: str


@dataclass(frozen=True)
class Part:
    """A piece of a bar: from x, so wide, in percent."""

    pool: str
    x: float
    width: float
    share: str


def spark(slice_: SliceStatus, cell: CellStatus | None, now: float) -> Spark | None:
    """The evidence of a slice; None where nothing was scored yet."""
    if cell is None:
        return None
    history = [(t, y) for t, y in slice_.history if math.isfinite(t) and math.isfinite(y)]
    history = _thinned(sorted(history))
    if not history and not slice_.scored:
        return None
    history = [*history, (max(now, history[-1][0]) if history else now, _finite(cell.nearness))]
    begin, end = history[0][0], history[-1][0]
    span = max(end - begin, _LEAST_S)
    # the latest is the end of the line, wherever it begins
    points = [(round(2 + ((t - end) / span + 1) * (WIDTH - 6), 1), _y(y)) for t, y in history]
    back = None
    if returns(slice_) and 0 < cell.log_leave_price < math.inf:
        back = _y(max(0.0, cell.log_below / cell.log_leave_price))
    says = f"evidence against the limit: {percent(max(0.0, _finite(cell.nearness)))} of its price"
    if back is not None:
        says += f"; for coming back: {percent(max(0.0, cell.log_below / cell.log_leave_price))}"
    drawn = " ".join(f"{x:g},{y:g}" for x, y in points)
    return Spark(drawn, points[-1], _y(1.0), back, says)


def _thinned(history: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points; of those left out the largest of each run stays."""
    if len(history) <= _POINTS:
        return history
    step = math.ceil(len(history) / _POINTS)
    return [max(history[i : i + step], key=lambda p: p[1]) for i in range(0, len(history), step)]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _y(fraction: float) -> float:
    return round(HEIGHT - 2 - min(max(fraction, 0.0), _TOP) / _TOP * (HEIGHT - 4), 1)


def served_parts(counts: Mapping[str, int]) -> tuple[Part, ...]:
    """Who served, as pieces of one bar; none where nobody was served."""
    known = {pool: counts.get(pool, 0) for pool in ("infer", "stable")}
    known |= {pool: n for pool, n in sorted(counts.items()) if pool not in known}
    total = sum(n for n in known.values() if n > 0)
    parts, x = [], 0.0
    for pool, n in known.items():
        if n > 0:
            width = 100 * n / total
            kind = pool if pool in ("infer", "stable") else "other"
            parts.append(Part(kind, round(x, 2), round(width, 2), _part(n / total)))
            x += width
    return tuple(parts)


def _part(share: float) -> str:
    """
    >>> _part(0.25), _part(0.0), _part(7.9e-6), _part(1 - 7.9e-6)
    ('25.0 %', '0 %', '< 0.1 %', '> 99.9 %')
    """
    return "< 0.1 %" if 0 < share < 0.0005 else percent(share)
