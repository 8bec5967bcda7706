# The ladder: one row a slice, worst first, the whole traffic last, all in one metric.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format
from servanda.report.html_scale import Scale

_ROWS = 10


class Track(NamedTuple):
    """One row of a drawing; places in percent of the width, None where there is nothing.

    Args:
        low, high: the interval; floor: end of the self-noise band; ring: the stable kernel.
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
    name: str
    whole: bool
    share: str
    glyph: str
    outcome: str
    value: str
    track: Track


class Ladder(NamedTuple):
    """Rows on one axis.

    Args:
        what: the metric; limit: as text where all rows have the same one, and where it
            stands; rest: what the rows left out say.
    """

    what: str
    rows: tuple[LadderRow, ...]
    scale: Scale
    limit: str
    limit_at: float | None
    has_floor: bool
    has_ring: bool
    golden: bool
    rest: str


def track(cell: CellVerdict, scale: Scale) -> Track:
    def at(value: float | None) -> float | None:
        return None if value is None else scale.at(abs(value))

    low = high = None
    if cell.interval:
        near, far = sorted(map(abs, cell.interval))
        around_zero = cell.interval[0] < 0 < cell.interval[1]
        low, high = scale.at(0.0 if around_zero else near), scale.at(far)
    return Track(
        cell.outcome.replace(" ", "-"),
        cell_text.meaning(cell),
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


def ladder(verdict: Verdict) -> Ladder | None:
    """The ladder of the metric that decides; None where no clause has a number."""
    family = _family(verdict)
    if not family:
        return None
    scale = Scale.of(shown_values(family))
    whole = [c for c in family if c.slice == WHOLE]
    others = [c for c in family if c.slice != WHOLE]
    drawn = [*others[: _ROWS - len(whole)], *whole]
    hidden = others[_ROWS - len(whole) :]
    limits = {c.limit for c in family if c.limit is not None}
    same = limits.pop() if len(limits) == 1 else None
    return Ladder(
        what=cell_text.quantity(family[0]),
        rows=tuple(_row(c, scale) for c in drawn),
        scale=scale,
        limit="" if same is None else cell_text.limit(family[0]),
        limit_at=None if same is None else scale.at(same),
        has_floor=any(c.floor is not None for c in family),
        has_ring=any(c.stable is not None for c in family),
        golden=family[0].section == "numerical",
        rest=_rest(hidden),
    )


def _row(cell: CellVerdict, scale: Scale) -> LadderRow:
    share = "" if cell.share is None or cell.section == "numerical" else format.percent(cell.share)
    return LadderRow(
        cell_text.where(cell),
        cell.slice == WHOLE,
        share,
        cell_text.GLYPH[cell.outcome],
        cell.outcome if cell.enforced else f"{cell.outcome} (monitored)",
        cell_text.of_cell(cell, cell.value) or "no number",
        track(cell, scale),
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
    """Cells of the deciding metric, one a slice: its worst; worst first, the whole last."""
    chosen = deciding(verdict)
    if chosen is None:
        return []

    def kin(cell: CellVerdict) -> tuple[object, ...]:
        return cell.section, cell.metric, cell.aggregate, cell.threshold, cell.workload

    family = [c for c in verdict.cells if kin(c) == kin(chosen) and c.outcome != "not applicable"]
    family = cell_text.worst_first(family)
    by_slice = {c.slice: c for c in reversed(family)}
    return [c for c in family if by_slice[c.slice] is c]


def _rest(hidden: Sequence[CellVerdict]) -> str:
    if not hidden:
        return ""
    says = {"holds": "hold", "violated": "are violated", "inconclusive": "are not decided"}
    counts = {o: sum(c.outcome == o for c in hidden) for o in ("violated", "error", "inconclusive")}
    holding = len(hidden) - sum(counts.values())
    parts = [f"{n} more {says.get(o, 'failed')}" for o, n in counts.items() if n]
    return ", ".join([*parts, *([f"{holding} more hold"] if holding else [])])
