# Drawings as SVG text: panels with axes, lines, dots and words, readable in light and in dark.
#
# A picture is WIDTH wide, and its letters have 14 px or more: a page shows it at 750 px or more,
# where they have 12.  It carries its own background, so that it can be read where a page's theme
# and the reader's system disagree.  A dash, a shape or a word repeats what a colour says.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH = 860
_LETTER = 8.2  # width of a letter of a plain text, px, on average and at most
_LIGHT = (
    "--bg:#ffffff;--fg:#1b1f24;--mu:#57606a;--ln:#dfe4ea;"
    "--c0:#57606a;--c1:#0b5fa5;--c2:#8a4b00;--c3:#1a6b3c;--c4:#8e2a8c;--bad:#b3261e"
)
_DARK = (
    "--bg:#14171a;--fg:#e8eaed;--mu:#9aa4af;--ln:#2b3138;"
    "--c0:#9aa4af;--c1:#6cb4f0;--c2:#f0b95a;--c3:#7bd49b;--c4:#e29be0;--bad:#ff8a80"
)
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")
SHAPES = ("circle", "square", "triangle", "diamond", "cross")
_COLOURS = "".join(
    f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}" for i in range(len(DASHES))
)
_STYLE = f"""<style>
svg{{{_LIGHT}}}
@media (prefers-color-scheme:dark){{svg{{{_DARK}}}}}
text{{font:15px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--fg)}}
.small{{font-size:14px;fill:var(--mu)}}.head{{font-weight:600}}.big{{font-size:18px;font-weight:600}}
.bg{{fill:var(--bg)}}.rail{{stroke:var(--ln)}}.edge{{stroke:var(--mu);stroke-dasharray:4 3}}
.none{{fill:none}}.thin{{stroke-width:1;opacity:.5}}.thick{{stroke-width:2.6}}
.open{{fill:var(--bg);stroke-width:1.5}}.bad{{fill:var(--bad)}}.sbad{{stroke:var(--bad)}}
{_COLOURS}
</style>"""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; on a logarithmic one what is not above `low` stands at its start."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def powers(cls, values: Iterable[float]) -> Axis:
        """The logarithmic axis of whole decades that holds some values; not positive ones aside.

        >>> Axis.powers([0.0, 0.02, 3.0])
        Axis(low=0.01, high=10.0, log=True)
        """
        shown = [v for v in values if v > 0] or [1.0]
        low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
        return cls(10.0**low, 10.0 ** max(high, low + 1), log=True)

    def at(self, value: float) -> float:
        """Share of the way from `low` to `high`, in [0, 1]."""
        if not self.log:
            share = (value - self.low) / (self.high - self.low)
        elif value <= self.low:
            return 0.0
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values, at most so many.

        >>> Axis(0, 50).ticks(), Axis(1e-3, 1.0, log=True).ticks()
        ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], [0.001, 0.01, 0.1, 1.0])
        """
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            every = math.ceil((last - first + 1) / most)
            return [10.0**p for p in range(first, last + 1, every)]
        rough = (self.high - self.low) / (most - 1)
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float, *, log: bool = False) -> str:
    """A tick's label; on a logarithmic axis a power of ten.

    >>> number(0.25), number(1e-5, log=True), number(1.0, log=True)
    ('0.25', '10⁻⁵', '1')
    """
    if not log:
        return f"{value:g}"
    power = round(math.log10(value))
    return f"{value:g}" if power in (0, 1) else f"10{str(power).translate(_RAISED)}"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(
    x: float, y: float, words: str, kind: str = "", anchor: str = "start", *, turned: float = 0
) -> str:
    """Words at a place, turned by so many degrees."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    at += f' transform="rotate({turned:g} {x:.1f} {y:.1f})"' if turned else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{at}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "rail") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def mark(x: float, y: float, series: int, title: str = "", size: float = 4.0) -> str:
    """One point of a series, in its colour and its shape."""
    shape, s = SHAPES[series % len(SHAPES)], size
    tip = f"<title>{escape(title)}</title>" if title else ""
    if shape == "circle":
        at = f'cx="{x:.1f}" cy="{y:.1f}" r="{s:.1f}"'
        return f'<circle class="open s{series}" {at}>{tip}</circle>'
    corners = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "triangle": [(0, -1.2 * s), (1.1 * s, s), (-1.1 * s, s)],
        "diamond": [(0, -1.3 * s), (1.3 * s, 0), (0, 1.3 * s), (-1.3 * s, 0)],
        "cross": [(-s, -s), (s, s), (0, 0), (s, -s), (-s, s), (0, 0)],
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="open s{series}" points="{points}">{tip}</polygon>'


@dataclass(frozen=True)
class Panel:
    """A rectangle of a picture with an axis each way; `left`, `top` of the plot itself."""

    left: float
    top: float
    width: float
    height: float
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return self.left + self.width * self.across.at(value)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - self.up.at(value))

    def frame(self, title: str = "", label: str = "", *, numbers: bool = True) -> list[str]:
        """Rails, ticks and words; `label` names the axis across."""
        bottom, right = self.top + self.height, self.left + self.width
        parts = []
        for tick in self.up.ticks(5):
            parts.append(line(self.left, self.y(tick), right, self.y(tick)))
            if numbers:
                shown = number(tick, log=self.up.log)
                parts.append(text(self.left - 8, self.y(tick) + 5, shown, "small", "end"))
        for tick in self.across.ticks(4):
            parts.append(line(self.x(tick), bottom, self.x(tick), bottom + 5))
            shown = number(tick, log=self.across.log)
            parts.append(text(self.x(tick), bottom + 20, shown, "small", "middle"))
        if title:
            parts.append(text(self.left, self.top - 14, title, "head"))
        if label:
            parts.append(text(self.left + self.width / 2, bottom + 42, label, "small", "middle"))
        return parts

    def path(self, points: Points, series: int, kind: str = "thick") -> str:
        """A line through points, in the colour and the dash of its series."""
        shown = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dash = f' stroke-dasharray="{DASHES[series]}"' if DASHES[series] else ""
        return f'<polyline class="none {kind} s{series}"{dash} points="{shown}"/>'


def sample(left: float, y: float, series: int) -> str:
    """A short piece of the line of a series."""
    dash = f' stroke-dasharray="{DASHES[series]}"' if DASHES[series] else ""
    ends = f'x1="{left:.1f}" y1="{y:.1f}" x2="{left + 30:.1f}" y2="{y:.1f}"'
    return f'<line class="thick s{series}"{dash} {ends}/>'


def legend(
    left: float, top: float, names: Sequence[tuple[int, str]], *, gap: float = 30
) -> list[str]:
    """Names of series in a row, each after its mark."""
    parts, x = [], left
    for series, name in names:
        parts += [mark(x + 5, top - 5, series), text(x + 18, top, name)]
        x += 18 + _LETTER * len(name) + gap
    return parts


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights of labels that are at least so far apart, in the order of the given ones.

    >>> apart([10.0, 100.0, 102.0, 101.0], 20.0)
    [10.0, 81.0, 121.0, 101.0]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []  # each a block of touching labels around its own middle

    def middle(group: Sequence[int]) -> float:
        return math.fsum(heights[i] for i in group) / len(group)

    for i in order:
        groups.append([i])
        while len(groups) > 1 and (
            middle(groups[-1]) - middle(groups[-2])
            < least * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = [0.0] * len(heights)
    for group in groups:
        for place, i in enumerate(group):
            found[i] = middle(group) + least * (place - (len(group) - 1) / 2)
    return found


def picture(width: int, height: int, title: str, about: str, parts: Iterable[str]) -> str:
    """The whole file.

    Args:
        title, about: for readers who cannot see it.
    """
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-labelledby="t d">',
            f'<title id="t">{escape(title)}</title>',
            f'<desc id="d">{escape(about)}</desc>',
            _STYLE,
            f'<rect class="bg" width="{width}" height="{height}" rx="6"/>',
            *parts,
            "</svg>\n",
        )
    )
