# The ladder: one row per slice, worst first within each split, all in one metric.  Beneath it the
# precision ladder: one row per format.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import Rung
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format, rungs
from servanda.report.html_shapes import Markup, Scale, drawing, line, mark, rect
from servanda.report.html_slices import SlicesOf, SliceWords, anchors, slice_words

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
        cell_text.GLYPH[cell.outcome],
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
