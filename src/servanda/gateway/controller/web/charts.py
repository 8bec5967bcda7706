# Drawings of the page: the evidence of a slice over time, and its share by pool.  Plain SVG, sized
# by attributes alone, for the page allows itself no inline style.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from servanda.gateway.controller.status import CellStatus, ControllerStatus, SliceStatus
from servanda.gateway.controller.web.format import clock
from servanda.gateway.controller.web.phrases import of_threshold, return_fraction, returns
from servanda.report.format import percent

WIDTH, HEIGHT, AXIS = 148, 30, 15  # of the evidence's drawing and the times below it, px
_TOP = 1.25  # fractions of the threshold that fit
_LEAST_S, _MOST_S = 60.0, 3600.0  # of the time axis
_LEAD = 1.04  # it begins a little before the first event, to show the state before
_POINTS = 120
_STEPS_S = (15, 30, 60, 120, 300, 600, 900)  # between two marks of the time axis
_MARKS = 4.5  # steps that the axis has, at most


@dataclass(frozen=True)
class Span:
    """The time axis that all drawings of a page share, unix seconds."""

    begin: float
    end: float

    def at(self, time: float) -> float:
        """Where a time is on the axis, 0 to 1."""
        return min(1.0, max(0.0, (time - self.begin) / (self.end - self.begin)))

    @property
    def marks(self) -> tuple[tuple[float, str], ...]:
        """Round times: place in per cent, and the time of day in UTC."""
        length = self.end - self.begin
        step = next((s for s in _STEPS_S if length / s <= _MARKS), _STEPS_S[-1])
        first = math.ceil(self.begin / step)
        times = (k * step for k in range(first, math.floor(self.end / step) + 1))
        digits = 5 if step >= 60 else 8
        return tuple((round(100 * self.at(t), 2), clock(t, t)[:digits]) for t in times)


def span(status: ControllerStatus) -> Span:
    """The last hour, or less where less is known."""
    times = [t for one in status.slices for t, _ in one.history]
    times += [t.at for t in status.transitions]
    times += [one.since for one in status.slices if one.since]
    past = [t for t in times if t < status.now]
    known = status.now - min(past, default=status.now)
    return Span(status.now - min(_MOST_S, max(_LEAST_S, _LEAD * known)), status.now)


@dataclass(frozen=True)
class Spark:
    """Log e-value as a fraction of its log threshold; the threshold is the dashed line.

    Args:
        points: of the line, for a polyline; last: its end; price: the height of the threshold.
        back: height of the return test; None where the slice is not diverted.
        first, until: the times at both ends of the axis.
        says: the same as a text.
    """

    points: str
    last: tuple[float, float] | None
    price: float
    back: float | None
    first: str
    until: str
    says: str


@dataclass(frozen=True)
class Part:
    """A piece of a bar: its start and width, in percent."""

    pool: str
    x: float
    width: float
    share: str


def spark(slice_: SliceStatus, cell: CellStatus | None, axis: Span) -> Spark | None:
    """The evidence of a slice; None where nothing was scored yet."""
    if cell is None:
        return None
    known = ((t, y) for t, y in slice_.history if math.isfinite(t) and math.isfinite(y))
    history = _thinned(sorted((t, y) for t, y in known if t >= axis.begin))
    if not history and not slice_.scored:
        return None
    history = [*history, (axis.end, _finite(cell.nearness))]
    points = [(round(2 + axis.at(t) * (WIDTH - 6), 1), _y(y)) for t, y in history]
    first, until = clock(axis.begin, axis.end), clock(axis.end, axis.end)
    says = f"alarm evidence from {first} to {until} UTC, now "
    says += f"{of_threshold(_finite(cell.nearness), 'log threshold')}"
    back = None
    if returns(slice_) and 0 < cell.log_leave_price < math.inf:
        back = _y(return_fraction(cell))
        says += f"; return test: {of_threshold(return_fraction(cell), 'log threshold')}"
    drawn = " ".join(f"{x:g},{y:g}" for x, y in points)
    return Spark(drawn, points[-1], _y(1.0), back, first[-8:], until, says)


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
    """The shares of the pools as pieces of one bar; none without requests."""
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
