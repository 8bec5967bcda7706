# The pictures below the first screen: drift over steps, both probabilities, log ratios;
# and the ladder: one row per slice, worst first within each split, all in one metric.  Beneath it
# the precision ladder: one row per format.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import EValuePath, Rung, StepSeries
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import JOINT, RATIO_EDGES, Portrait
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format, rungs
from servanda.report.format import number
from servanda.report.html_cards import described
from servanda.report.html_slices import SlicesOf, SliceWords, anchors, slice_words
from servanda.theory.stats.alpha import log_price

# Drawings: axes in percent of their width, so that a picture fits any screen and its text keeps
# its size; shapes that say with their form what they say with their colour.

NARROW = 120  # pixels: the smallest width at which an axis beside text is drawn
WIDE = 250  # and one that has the width of a phone
_LETTER = 7.5  # pixels that a letter of a label takes at most
_GAP = 6.0  # pixels between two labels
_EDGE = 6.0  # percent: nearer to an end, a label begins or ends at its tick
_FAR = 1e30  # beyond it a number is drawn as what is infinite, or zero, is
_AXIS = 6  # decades: what lies further below the largest value is drawn at the left edge


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
        low = max(min(positive, default=0.1), high / 10**_AXIS)
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


_MANY = 60  # steps beyond which single intervals are not drawn
_CUT = 2.0  # thresholds, on a log scale, beyond which an e-value is drawn at the edge
CLIP = (0.8, 1.2)  # of the ratio: PPO's usual range
_PER_DECADE, _DECADES = 4, 5  # bins of the histogram, from 1e-4 to 10 nats
_MIDDLE = 4.0  # percent: half of the bin around 0
_SHARES = (0.001, 0.01, 0.1, 1.0)  # nats, at edges of RATIO_EDGES
_NAMED = 8  # worst tokens that are numbered in the picture
_LEAST_BINS = 16  # of the picture of both probabilities


class Panel(NamedTuple):
    title: str
    note: str
    picture: Markup


def steps(verdict: Verdict, slices: SlicesOf) -> tuple[Panel, ...]:
    """A panel for each series of a dump, all on the same two axes."""
    series = verdict.breakdown.series if verdict.breakdown else ()
    points = [p for s in series for p in s.points if p.mean is not None]
    if not points:
        return ()
    reach = [v for p in points for v in (p.mean, p.high)] + [s.limit for s in series]
    lows = [p.mean for p in points] + [s.limit for s in series]
    up = Scale.of([*lows, max(v for v in reach if v is not None)])
    first, last = points[0].step, max(p.step for p in points)
    return tuple(_panel(one, up, first, last, slices) for one in series)


def e_values(verdict: Verdict, slices: SlicesOf) -> tuple[Panel, ...]:
    """A panel for each cell whose evidence is known at every evaluation."""
    holds, violated = log_price(verdict.alpha), log_price(verdict.alpha_violated)
    outcomes = {(cell.clause, cell.place): cell.outcome for cell in verdict.cells}
    return tuple(
        _path(path, outcomes.get((path.clause, path.slice), ""), holds, violated, slices)
        for path in verdict.circumstances.e_values
    )


def _path(path: EValuePath, outcome: str, holds: float, violated: float, slices: SlicesOf) -> Panel:
    """Log e-values against prompt groups, in nats; what is far beyond a threshold is cut."""
    low, high = -violated, _CUT * violated
    last = path.groups[-1]

    def x(groups: float) -> float:
        return 97 * groups / last

    def up(nats: float) -> float:
        return 100 * (min(max(nats, low), high) - low) / (high - low)

    shapes = []
    same = violated - holds < 1e-9
    named = [(violated, "violated", -5)] + ([] if same else [(holds, "holds", 14)])
    for threshold, word, dy in named:
        y = 100 - up(threshold)
        words = f"{'holds and ' if same else ''}{word} at {number(math.exp(threshold))}"
        shapes.append(line("limit", 0, y, 100, y))
        shapes.append(text(words, "0", y, dy=dy, kind="ink shift-start"))
    for tone, kind, nats in (
        ("holds", "serves", path.e_holds),
        ("violated", "aside", path.e_violated),
    ):
        points = [(x(n), 100 - up(e)) for n, e in zip(path.groups, nats, strict=True)]
        shapes.append(curve(kind, points))
        marks = points if len(points) <= _MANY else points[-1:]
        shapes += [toned(tone, mark(tone, *point, 3.6)) for point in marks]
    words = slices.of(path.slice)
    title = f"{format.line(path.clause, 40)} on {words.name}"
    ends = path.e_holds[-1], path.e_violated[-1]
    note = (
        f"{outcome} after {format.count(last, 'prompt group')} and "
        f"{format.count(len(path.groups), 'evaluation')}; log e-value for holds {number(ends[0])}, "
        f"threshold {number(holds)}; for violated {number(ends[1])}, threshold {number(violated)}"
    )
    decades = range(math.ceil(low / math.log(10)), math.floor(high / math.log(10)) + 1, 2)
    picture = plot(
        f"E-values of {title}: {note}.",
        200,
        shapes,
        across=spaced([Tick(x(n), f"{n:,}") for n in (last, 0, *_round_steps(0, last))], WIDE),
        up=[Tick(up(d * math.log(10)), number(10.0**d)) for d in decades],
        titles=("prompt groups", "e-value, log scale"),
    )
    return Panel(title, note, picture)


def _panel(one: StepSeries, up: Scale, first: int, last: int, slices: SlicesOf) -> Panel:
    def at(step: int) -> float:
        return 3 + 94 * (step - first) / max(last - first, 1)

    words = slices.of(one.slice)
    limit = 100 - up.at(one.limit)
    known = [p for p in one.points if p.mean is not None]
    beyond = sum((p.mean or 0.0) > one.limit for p in known)
    shapes = [line("limit", 0, limit, 100, limit)]
    shapes.append(text(f"limit {number(one.limit)}", 100, limit, dy=-5, anchor="end", kind="ink"))
    if one.since is not None:
        place, side = at(one.since), "end" if at(one.since) > 50 else "start"
        shapes.append(line("since", place, 0, place, 100))
        words_at = f"above since step {one.since}"
        shapes.append(text(words_at, place, "0", dy=14, anchor=side, kind="ink shift-" + side))
    many = len(known) > _MANY
    for point in known:
        tone = "violated" if (point.mean or 0.0) > one.limit else "holds"
        x, y = at(point.step), 100 - up.at(point.mean or 0.0)
        if point.low is not None and point.high is not None and not many:
            ends = 100 - up.at(point.low), 100 - up.at(point.high)
            shapes.append(toned(tone, line("bar", x, ends[0], x, ends[1])))
        shapes.append(toned(tone, mark(tone, x, y, 2.4 if many else 4)))
    worst = max(known, key=lambda p: p.mean or 0.0)
    where = words.name if not words.definition else f"{words.name} ({words.definition})"
    says = f"{beyond} of {len(known)} steps above the limit {number(one.limit)}"
    if one.since is not None:
        says += f", every step since step {one.since}"
    label = (
        f"Mean {one.metric} on {where} over training steps {first} to {last}: {says}; "
        f"the largest is {number(worst.mean)} at step {worst.step}."
    )
    ticks = [Tick(at(s), f"{s}") for s in (first, last, *_round_steps(first, last))]
    picture = plot(
        label,
        200,
        shapes,
        across=spaced(ticks, WIDE),
        up=up.ticks(200),
        titles=("training step", f"mean {one.metric}, log scale"),
    )
    return Panel(where[0].upper() + where[1:] if not words.definition else where, says, picture)


def _round_steps(first: int, last: int) -> Iterator[int]:
    width = max(last - first, 1) / 5
    power = 10 ** math.floor(math.log10(width))
    step = max(int(next(m * power for m in (1, 2, 5, 10) if m * power >= width)), 1)
    yield from range(-(-first // step) * step, last, step)


class Joint(NamedTuple):
    """Both probabilities of the sampled tokens, and the tokens that are numbered in it."""

    picture: Markup
    named: int
    n: str


def joint(verdict: Verdict) -> Joint | None:
    """How many tokens have which two probabilities; None where they were not counted."""
    what, portrait = described(verdict)
    if not portrait.joint:
        return None
    counts = {tuple(map(int, key.split(","))): n for key, n in portrait.joint.items()}
    size = max(max(max(key) for key in counts) + 1, _LEAST_BINS)
    most, total = max(counts.values()), sum(counts.values())
    shapes = [line("limit", 0, 100, 100, 0)]
    for (i, j), n in sorted(counts.items()):
        x, y = (100 * (k + 0.5) / size for k in (i, j))
        radius = 1.3 + 3.2 * math.log1p(n) / math.log1p(most)
        # -logp grows to the right, and down
        shapes.append(f'<circle class="many" cx="{100 - x:.2f}%" cy="{y:.2f}%" r="{radius:.1f}"/>')
    named, taken = 0, []
    for n, worst in enumerate(portrait.worst[:_NAMED], start=1):
        x, y = (100 - _nats(p, size) for p in (worst.p_infer, worst.p_train))
        shapes.append(toned("violated", mark("violated", x, 100 - y, 3.4)))
        named = n
        if all(abs(x - a) > 6 or abs(y - b) > 5 for a, b in taken):
            taken.append((x, y))
            shapes.append(text(f"{n}", x, 100 - y, dy=-8, anchor="middle", kind="ink"))
    decade = 100 * math.log(10) / (JOINT * size)
    ticks = [Tick(100 - i * decade, number(10.0**-i)) for i in range(int(100 / decade) + 1)]
    near = sum(n for (i, j), n in counts.items() if abs(i - j) <= 1)
    label = (
        f"Probability of {total:,} sampled tokens under the infer kernel, across, and under the "
        f"train kernel, upwards: {format.percent(near / total)} lie on the diagonal or within "
        f"{2 * JOINT:g} nats of it; the {named} tokens with the largest difference are numbered."
    )
    picture = plot(
        label,
        330,
        shapes,
        across=spaced(ticks, WIDE),
        up=spaced(ticks, 600),
        titles=("probability, infer kernel, log scale", "probability, train kernel, log scale"),
    )
    return Joint(picture, named, f"{total:,} tokens of the {what}")


def _nats(p: float, size: int) -> float:
    """-log p in percent of the axis."""
    nats = -math.log(p) if p > 0 else math.inf
    return min(100 * nats / (JOINT * size), 100.0)


class RatioRow(NamedTuple):
    name: str
    n: str
    shares: tuple[str, ...]


class Ratios(NamedTuple):
    """The signed log ratios of tokens, and the shares of tokens beyond some of them."""

    picture: Markup
    heads: tuple[str, ...]
    rows: tuple[RatioRow, ...]
    below: str
    above: str
    has_floor: bool


_SIDES = (
    ("infer", "infer kernel against train kernel"),
    ("self_infer", "noise floor: infer kernel in other batches"),
    ("self_train", "noise floor: train kernel in other batches"),
    ("stable", "stable kernel against train kernel"),
)


def ratios(verdict: Verdict) -> Ratios | None:
    """The distribution of log p_train - log p_infer, with its noise floor and the clip range."""
    what, portrait = described(verdict)
    if not portrait.total.n:
        return None
    sides = [("infer kernel against train kernel, golden texts", portrait)]
    noise: Portrait | None = None
    if what == "workload":
        of = verdict.portraits
        sides = [(words, of[name]) for name, words in _SIDES if name in of and of[name].total.n]
        noise = of.get("self_infer")
    edges = [0.0, *RATIO_EDGES]
    rows = []
    for words, one in sides:
        counts = np.add(*map(np.array, one.ratios))
        beyond = counts[::-1].cumsum()[::-1] / max(counts.sum(), 1)
        at = [int(np.argmin(np.abs(np.array(edges) - x))) for x in _SHARES]
        shares = tuple(format.percent(float(beyond[i])) for i in at)
        rows.append(RatioRow(words, f"{one.total.n:,}", shares))
    below, above = (f"{sum(side):,}" for side in portrait.ratios)
    drawn = _histogram(portrait, noise if noise is not None and noise.total.n else None)
    heads = tuple(f"≥ {number(x)}" for x in _SHARES)
    return Ratios(drawn, heads, tuple(rows), below, above, noise is not None)


def _place(x: float) -> float:
    """Percent of the width of a signed log ratio: logarithmic on both sides of a middle."""
    least = 10.0 ** (1 - _DECADES)
    if abs(x) <= least:
        return 50.0
    far = min(math.log10(abs(x) / least) / _DECADES, 1.0)
    return 50 + math.copysign(_MIDDLE + (50 - _MIDDLE) * far, x)


def _bars(portrait: Portrait) -> list[tuple[float, float, float]]:
    """(left, right, share) from left to right; the middle holds all that is nearer to 0."""
    each = len(RATIO_EDGES) // 7 // _PER_DECADE  # bins of RATIO_EDGES in one bar
    first = 1 + int(np.argmin(np.abs(np.array(RATIO_EDGES) - 10.0 ** (1 - _DECADES))))
    total = max(sum(map(sum, portrait.ratios)), 1)
    sides: list[list[tuple[float, float, float]]] = []
    for sign, counts in zip((-1, 1), portrait.ratios, strict=True):
        bars = []
        for i in range(first, len(RATIO_EDGES), each):
            ends = RATIO_EDGES[i - 1], RATIO_EDGES[min(i - 1 + each, len(RATIO_EDGES) - 1)]
            # a bit further out, so that rounding puts no edge of a bar into the middle
            places = (_place(sign * end * (1 + 1e-9)) for end in ends)
            n = sum(counts[i : i + each]) + (counts[-1] if i + each >= len(RATIO_EDGES) else 0)
            bars.append((*sorted(places), n / total))
        sides.append(bars)
    near = sum(sum(counts[:first]) for counts in portrait.ratios) / total
    middle = (50 - _MIDDLE, 50 + _MIDDLE, near)
    return [*reversed(sides[0]), middle, *sides[1]]


def _histogram(portrait: Portrait, noise: Portrait | None) -> Markup:
    bars = _bars(portrait)
    least = 1 / max(portrait.total.n, 1)
    up = Scale(Scale.of([least]).low, 1.0)
    clip = tuple(_place(math.log(end)) for end in CLIP)
    shapes = [rect("clip", clip[0], 0, clip[1] - clip[0], 100)]
    for left, right, share in bars:
        if share > 0:
            top = up.at(share)
            shapes.append(rect("column", left + 0.15, 100 - top, right - left - 0.3, top))
    if noise is not None:
        for left, right, share in _bars(noise):
            if share > 0:
                y = 100 - up.at(share)
                shapes.append(line("floor-line", left, y, right, y))
    shapes += [line("limit", x, 0, x, 100) for x in clip]
    shapes.append(text(f"clip range {CLIP[0]}–{CLIP[1]}", 100, "0", dy=-10, anchor="end"))
    wanted = [Tick(50, "0")]
    for x in (1.0, 0.01, 0.1, 1e-3, 10.0):
        wanted += [Tick(_place(-x), f"−{number(x)}"), Tick(_place(x), number(x))]
    low, high = clip[0] - 2, clip[1] + 2
    inside = sum(share for left, right, share in bars if left >= low and right <= high)
    label = (
        f"Histogram of the log ratio of {portrait.total.n:,} sampled tokens, logarithmic on both "
        f"sides of 0, with the clip range {CLIP[0]} to {CLIP[1]} shaded: about "
        f"{format.percent(inside)} of the tokens lie inside."
    )
    return plot(
        label,
        230,
        shapes,
        across=spaced(wanted, WIDE),
        up=up.ticks(200),
        titles=("log p_train − log p_infer, nats", "share of tokens, log scale"),
    )


_ROWS = 10
_MEANINGS = {
    "tv": "tv (total variation): the share of next-token probability that moved, from 0 to 1",
    "abs_log_ratio_nats": "log ratio: log p of the train kernel minus log p of the infer kernel",
    "logit_osc_nats": "osc: the largest minus the smallest change of a logit, over the vocabulary",
}


class Track(NamedTuple):
    """One row of a drawing; places in percent of the width, None where there is nothing.

    Args:
        low, high: the interval; floor: end of the noise floor band; ring: the stable kernel.
    """

    tone: str
    title: str
    dot: float | None = None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    limit: float | None = None
    ring: float | None = None


class LadderRow(NamedTuple):
    """One slice.

    Args:
        anchor: of its cell among the numbers.
    """

    name: str
    definition: str
    whole: bool
    share: str
    glyph: str
    outcome: str
    value: str
    interval: str
    limit: str
    anchor: str
    track: Track


class Split(NamedTuple):
    """Rows of slices of one split, which have no token in common; "" for all others."""

    name: str
    rows: tuple[LadderRow, ...]


class Ladder(NamedTuple):
    """Rows on one axis.

    Args:
        what: the metric; meaning: of its name; splits: the one with the worst slice first, the
            whole traffic last; rest: how the rows that are left out were answered.
    """

    what: str
    meaning: str
    splits: tuple[Split, ...]
    scale: Scale
    has_floor: bool
    has_ring: bool
    golden: bool
    rest: str

    @property
    def rows(self) -> tuple[LadderRow, ...]:
        return tuple(row for split in self.splits for row in split.rows)


def track(cell: CellVerdict, scale: Scale, place: str) -> Track:
    def at(value: float | None) -> float | None:
        return None if value is None else scale.at(abs(value))

    low = high = None
    if cell.interval:
        near, far = sorted(map(abs, cell.interval))
        around_zero = cell.interval[0] < 0 < cell.interval[1]
        low, high = scale.at(0.0 if around_zero else near), scale.at(far)
    return Track(
        cell.outcome.replace(" ", "-"),
        cell_text.meaning(cell, place),
        at(cell.value),
        low,
        high,
        at(cell.floor),
        at(cell.limit),
        at(cell.stable),
    )


def shown_values(cells: Sequence[CellVerdict]) -> list[float | None]:
    """Everything of some cells that an axis has to reach."""
    ends = [abs(end) for c in cells for end in c.interval or ()]
    marks = [v for c in cells for v in (c.value, c.limit, c.stable)]
    floors = [c.floor for c in cells if c.floor and c.limit and c.floor > c.limit / 300]
    return [*ends, *(None if v is None else abs(v) for v in marks), *floors]


def drawn_track(t: Track, height: int) -> Markup:
    """The row of a ladder or of a table, as a picture."""
    middle, shapes = f"{height / 2:g}", []
    if t.floor is not None:
        shapes.append(rect("band", 0, "1", t.floor, f"{height - 2}"))
    shapes.append(line("rail", 0, middle, 100, middle))
    if t.limit is not None:
        shapes.append(line("limit", t.limit, "0", t.limit, f"{height}"))
    if t.low is not None and t.high is not None:
        shapes.append(line("bar", t.low, middle, t.high, middle))
    if t.ring is not None:
        shapes.append(f'<circle class="ring" cx="{t.ring}%" cy="{middle}" r="4"/>')
    if t.dot is not None:
        shapes.append(mark(t.tone, t.dot, middle, 4.8 if height > 18 else 4))
    return drawing(t.title, height, shapes, f"t-{t.tone}")


def ladder(verdict: Verdict, slices: SlicesOf | None = None) -> Ladder | None:
    """The ladder of the metric that decides; None where no clause has a number."""
    family = _family(verdict)
    if not family:
        return None
    slices = slices or slice_words(None)
    scale = Scale.of(shown_values(family))
    whole = [c for c in family if c.place == WHOLE]
    others = [c for c in family if c.place != WHOLE]
    drawn, hidden = others[: _ROWS - len(whole)], others[_ROWS - len(whole) :]
    names = anchors(verdict.cells)
    places = {id(cell): names[i] for i, cell in enumerate(verdict.cells)}
    splits: dict[str, list[LadderRow]] = {}
    for cell in [*drawn, *whole]:
        words = slices.of_cell(cell)
        split = "" if cell.place != WHOLE else WHOLE
        row = _row(cell, scale, words, places[id(cell)])
        splits.setdefault(words.split or split, []).append(row)
    return Ladder(
        what=f"{'share of ' * (family[0].threshold is not None)}{cell_text.quantity(family[0])}",
        meaning=_MEANINGS.get(family[0].metric, ""),
        splits=tuple(Split("" if name == WHOLE else name, tuple(r)) for name, r in splits.items()),
        scale=scale,
        has_floor=any(c.floor is not None for c in family),
        has_ring=any(c.stable is not None for c in family),
        golden=family[0].section == "numerical",
        rest=_rest(hidden),
    )


def _row(cell: CellVerdict, scale: Scale, words: SliceWords, anchor: str) -> LadderRow:
    numerical = cell.section == "numerical"
    share = "" if cell.share is None or numerical else format.percent(cell.share)
    place = words.name + (f" ({words.definition})" if words.definition else "")
    return LadderRow(
        cell_text.where(cell) if numerical else words.name,
        words.definition,
        cell.place == WHOLE,
        share,
        cell_text.glyph_of(cell),
        cell.outcome if cell.enforced else f"{cell.outcome} (monitored)",
        cell_text.of_cell(cell, cell.value) or "no number",
        cell_text.interval(cell),
        cell_text.signed_limit(cell),
        anchor,
        track(cell, scale, place),
    )


def deciding(verdict: Verdict) -> CellVerdict | None:
    """The cell whose metric the first screen draws.

    The worst enforced one that was violated; else the first sampled mean; else anything
    with a limit and a number.
    """
    cells = [c for c in verdict.cells if c.limit is not None and c.section != "observability"]
    cells = [c for c in cells if c.outcome != "not applicable"]
    red = [c for c in cell_text.worst_first(cells) if c.enforced and c.outcome == "violated"]
    red.sort(key=lambda c: c.section == "numerical")
    means = [c for c in cells if c.section == "statistical" and c.aggregate == "mean"]
    numbers = [c for c in cells if c.value is not None]
    return next(iter([*red, *means, *numbers]), None)


def _family(verdict: Verdict) -> list[CellVerdict]:
    """Cells of the deciding metric, one per slice, worst first: the worst that is enforced, and a
    monitored one only where no other is, for its limit is another."""
    chosen = deciding(verdict)
    if chosen is None:
        return []

    def kin(cell: CellVerdict) -> tuple[object, ...]:
        return cell.section, cell.metric, cell.aggregate, cell.threshold, cell.workload

    family = [c for c in verdict.cells if kin(c) == kin(chosen) and c.outcome != "not applicable"]
    family = cell_text.worst_first(family)
    first: dict[str, CellVerdict] = {}
    for cell in sorted(family, key=lambda c: not c.enforced):
        first.setdefault(cell.place, cell)
    return [c for c in family if first[c.place] is c]


def _rest(hidden: Sequence[CellVerdict]) -> str:
    if not hidden:
        return ""
    says = {"holds": "hold", "violated": "are violated", "inconclusive": "are not decided"}
    counts = {o: sum(c.outcome == o for c in hidden) for o in ("violated", "error", "inconclusive")}
    holding = len(hidden) - sum(counts.values())
    parts = [f"{n} more {says.get(o, 'failed')}" for o, n in counts.items() if n]
    return ", ".join([*parts, *([f"{holding} more hold"] if holding else [])])


class RungRow(NamedTuple):
    """One format of the picture."""

    name: str
    value: str
    candidate: bool
    track: Track


class RungPicture(NamedTuple):
    """The formats on one axis, nearest first.

    Args:
        place: where the candidate is, in a sentence; missing: formats that were not measured.
    """

    rows: tuple[RungRow, ...]
    scale: Scale
    tokens: str
    place: str
    missing: tuple[str, ...]


def rung_picture(verdict: Verdict) -> RungPicture | None:
    found = verdict.circumstances.rungs
    order = rungs.by_distance(found)
    if not order:
        return None
    scale = Scale.of(rung.tv for rung in order)
    tokens = max(rung.tokens for rung in order)
    return RungPicture(
        tuple(_rung_row(rung, scale) for rung in order),
        scale,
        format.count(tokens, "given token"),
        rungs.place(found),
        rungs.missing(found),
    )


def _rung_row(rung: Rung, scale: Scale) -> RungRow:
    name, value, *_ = rungs.cells(rung)
    dot = scale.at(rung.tv or 0.0)
    track = Track("holds" if rung.candidate else "rung", f"{name}: {value}")
    # the candidate has the mark of a cell, a format the ring of what it is compared with
    track = track._replace(dot=dot) if rung.candidate else track._replace(ring=dot)
    return RungRow(name, value, rung.candidate, track)
