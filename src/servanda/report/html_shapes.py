# Drawings: axes in percent of their width, so that a picture fits any screen and its text keeps
# its size; shapes that say with their form what they say with their colour.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from servanda.report.format import number

NARROW = 120  # pixels: the smallest width at which an axis beside text is drawn
WIDE = 250  # and one that has the width of a phone
_LETTER = 7.5  # pixels that a letter of a label takes at most
_GAP = 6.0  # pixels between two labels
_EDGE = 6.0  # percent: nearer to an end, a label begins or ends at its tick
_FAR = 1e30  # beyond it a number is drawn as what is infinite, or zero, is
_DECADES = 6  # what lies further below the largest value is drawn at the left edge


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


class Tick(NamedTuple):
    at: float
    label: str

    @property
    def anchor(self) -> str:
        return "start" if self.at < _EDGE else "end" if self.at > 100 - _EDGE else "middle"

    def box(self, width: float) -> tuple[float, float]:
        """Where its label begins and ends on an axis of so many pixels."""
        size, at = _LETTER * len(self.label), self.at * width / 100
        begin = {"start": at, "end": at - size, "middle": at - size / 2}[self.anchor]
        return begin, begin + size


def spaced(ticks: Iterable[Tick], width: float) -> tuple[Tick, ...]:
    """Those ticks, the first ones preferred, whose labels do not touch; from left to right."""
    chosen: list[Tick] = []
    for tick in ticks:
        left, right = tick.box(width)
        boxes = (other.box(width) for other in chosen)
        if all(right + _GAP <= low or high + _GAP <= left for low, high in boxes):
            chosen.append(tick)
    return tuple(sorted(chosen))


class Scale(NamedTuple):
    """A logarithmic axis from `low` to `high`, both positive; others stand at its ends."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Scale:
        """The axis that shows some values; those that are not positive stand at the left."""
        positive = [v for v in values if v is not None and 1 / _FAR < v < _FAR]
        high = max(positive, default=1.0)
        low = max(min(positive, default=0.1), high / 10**_DECADES)
        return cls(_step_below(low / 1.1), _step_above(high * 1.1))

    def at(self, value: float) -> float:
        """Percent of the width; 0 where the value is not above `low`."""
        if math.isnan(value) or value <= self.low:
            return 0.0
        share = math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
        return round(100 * share, 3)

    def ticks(self, width: float = NARROW) -> tuple[Tick, ...]:
        """At every power of ten, and at 3 of its decade, as far as their labels have room."""
        powers = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        steps = [m * 10.0**p for m in (1, 3) for p in powers]
        inside = [s for s in steps if self.low * 0.999 <= s <= self.high * 1.001]
        return spaced((Tick(self.at(s), number(s)) for s in inside), width)


def _step_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return power * (3 if value >= 3 * power else 1)


def _step_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return power * (3 if value <= 3 * power else 10)


# shapes; numbers are percent, texts are lengths as they are


def _length(value: float | str) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}%"


def line(kind: str, x1: float, y1: float | str, x2: float, y2: float | str) -> str:
    a, b, c, d = map(_length, (x1, y1, x2, y2))
    return f'<line class="{kind}" x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>'


def rect(kind: str, x: float, y: float | str, width: float, height: float | str) -> str:
    a, b, c, d = map(_length, (x, y, max(width, 0), height))
    return f'<rect class="{kind}" x="{a}" y="{b}" width="{c}" height="{d}"/>'


def curve(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """A line through points, in percent from the left and the top; "" through less than two."""
    if len(points) < 2:
        return ""
    at = " ".join(f"{round(x, 2):g},{round(y, 2):g}" for x, y in points)
    return (
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<polyline class="{kind}" points="{at}" vector-effect="non-scaling-stroke"/></svg>'
    )


def text(
    words: str,
    x: float | str,
    y: float | str,
    *,
    dy: float = 0,
    anchor: str = "start",
    kind: str = "",
) -> str:
    name = f' class="{kind}"' if kind else ""
    return (
        f'<text{name} x="{_length(x)}" y="{_length(y)}" dy="{dy:g}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


_MARKS = {
    "violated": "M-1-1L1 1M1-1L-1 1",  # a cross
    "error": "M-1-1H1V1H-1Z",  # a square
    "inconclusive": "M0-1.3L1.3 0L0 1.3L-1.3 0Z",  # an open diamond
    "unseen": "M-1 0A1 1 0 0 1 1 0A1 1 0 0 1-1 0Z",  # a ring
}


def mark(tone: str, x: float | str, y: float | str, size: float = 4.6) -> str:
    """A value: a dot, unless it is violated (a cross), not decided, or an error."""
    a, b = _length(x), _length(y)
    if tone not in _MARKS:
        return f'<circle class="dot" cx="{a}" cy="{b}" r="{size:g}"/>'
    return (
        f'<svg class="mark" x="{a}" y="{b}"><path class="m-{tone}" '
        f'transform="scale({size:g})" d="{_MARKS[tone]}"/></svg>'
    )


def toned(tone: str, shape: str) -> str:
    """A shape in the colour of an outcome."""
    return f'<g class="t-{tone}">{shape}</g>'


def key(tone: str, words: str = "") -> Markup:
    """A mark in a line of text, for a legend or a table."""
    return Markup(
        f'<svg class="key t-{tone}" style="width:14px" height="14" aria-hidden="true">'
        f"{mark(tone, '7', '7')}</svg>{escape(words)}"
    )


def drawing(label: str, height: int, shapes: Iterable[str], kind: str = "") -> Markup:
    """One picture.

    Args:
        label: what it shows, in a sentence, for those who do not see it.
    """
    name = f' class="{kind}"' if kind else ""
    return Markup(
        f'<svg{name} height="{height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def axis(scale: Scale, label: str, width: float = NARROW) -> Markup:
    """A horizontal axis; its label says what and in which unit."""
    shapes = []
    for tick in scale.ticks(width):
        shapes.append(line("rail", tick.at, "0", tick.at, "4"))
        shapes.append(text(tick.label, tick.at, "16", anchor=tick.anchor))
    return drawing(f"Axis: {label}.", 20, shapes)


def plot(
    label: str,
    height: int,
    shapes: Sequence[str],
    *,
    across: Sequence[Tick],
    up: Sequence[Tick],
    titles: tuple[str, str],
) -> Markup:
    """A picture with two axes; the labels of the left one stand outside of the drawing.

    Args:
        across, up: ticks in percent, from the left and from below.
        titles: of the horizontal axis, and of the vertical one, which stands above it.
    """
    grid = []
    for tick in up:
        y = 100 - tick.at
        grid.append(line("rail", 0, y, 100, y))
        grid.append(text(tick.label, "-6", y, dy=4, anchor="end"))
    for tick in across:
        grid.append(line("rail", tick.at, 0, tick.at, 100))
        grid.append(text(tick.label, tick.at, 100, dy=16, anchor=tick.anchor))
    grid.append(text(titles[0], 50, 100, dy=35, anchor="middle"))
    grid.append(text(titles[1], "-46", "0", dy=-10))
    return drawing(label, height, [*grid, *shapes])
