# The runs of a folder as a page: per contract the runs, a picture of the cells nearest to their
# limits, and every value.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from servanda.cli.history_text import (
    RUN_HEADS,
    bound,
    cell_name,
    class_line,
    gate_reason,
    run_row,
    title,
    value_rows,
)
from servanda.judgement.clauses.base import CellVerdict
from servanda.report.cell_text import GLYPH, limit_sign, of_cell
from servanda.report.format import count, percent
from servanda.report.html import Sheet, Story, board
from servanda.report.html_shapes import (
    WIDE,
    Markup,
    Scale,
    Tick,
    curve,
    key,
    line,
    mark,
    plot,
    spaced,
    text,
    toned,
)
from servanda.runner.run_history.history_gate import Gate, promise
from servanda.runner.run_history.run_record import ContractRuns, History, Key

_PANELS = 6  # cells that are drawn; the table has all
_HEIGHT = 200  # pixels
_NOTE = Markup(
    f"{key('holds', 'holds ')}{key('violated', 'violated ')}{key('inconclusive', 'inconclusive')}"
    "<br>A mark per run, oldest at the left, with its interval. Short dashes: the limit. "
    "Vertical: the infer kernel is another build than before."
)


def history_page(
    history: History, gates: Sequence[Gate], last: int, slice_: str | None = None
) -> str:
    """A self-contained page."""
    stories = [_story(of, gates, last, slice_) for of in history.contracts]
    if history.unread:
        sheet = Sheet("Files that were not read", "", "", ("file and reason",), _one(history))
        stories.append(Story("Not read", f"{count(len(history.unread), 'file')}.", [sheet]))
    return board("History of runs", stories)


def _one(history: History) -> list[tuple[str]]:
    return [(text,) for text in history.unread]


def _story(of: ContractRuns, gates: Sequence[Gate], last: int, slice_: str | None) -> Story:
    outcome = of.newest.verdict.outcome
    words = f"The newest run: {outcome}, {of.newest.build}."
    for gate in gates:
        if gate.contract == of.name:
            outcome = gate.outcome
            words = f"The newest run is {gate_reason(gate)}. {promise(last)}"
            words = " ".join([words, *(f"{note[:1].upper()}{note[1:]}." for note in gate.notes)])
    sheets = []
    for cell in _nearest(of, slice_)[:_PANELS]:
        sheets.append(Sheet(cell_name(cell), "" if sheets else _NOTE, cell_picture(of, cell)))
    heads, *rows = value_rows(of, None, slice_)
    sheets.append(Sheet("Values", "✓ holds, ✗ violated, ? inconclusive", "", heads, rows))
    rows = [run_row(n, run) for n, run in enumerate(of.runs, start=1)]
    note = class_line(of)
    sheets.append(Sheet("Runs", f"{note[:1].upper()}{note[1:]}.", "", RUN_HEADS, rows))
    return Story(f"{GLYPH[outcome]} {title(of)}", words, sheets)


def _nearest(of: ContractRuns, slice_: str | None) -> list[CellVerdict]:
    """Cells with a limit, those first whose newest value is nearest to it or beyond it."""
    newest = of.newest.cells()
    found = [newest[k] for k in of.cell_keys(slice_) if k in newest and newest[k].limit is not None]
    promises = [c for c in found if c.section != "observability"]
    return sorted(promises, key=lambda c: -_share(c))


def _share(cell: CellVerdict) -> float:
    """The value as a share of the limit; inverted where the limit is a lower one."""
    value, limit = cell.value or 0.0, cell.limit or 0.0
    of, by = (limit, value) if limit_sign(cell) == "≥" else (value, limit)
    return of / by if by else math.inf * of if of else 0.0


def cell_picture(of: ContractRuns, cell: CellVerdict) -> Markup:
    """The values of a cell over the runs, with intervals and limits."""
    name: Key = (cell.clause, cell.slice)
    cells = [run.cells().get(name) for run in of.runs]
    ends = [x for c in cells if c is not None for x in (c.value, c.limit, *(c.interval or ()))]
    up, last = Scale.of(ends), max(len(cells) - 1, 1)

    def across(i: int) -> float:
        return 3 + 94 * i / last

    shapes: list[str] = []
    for i, (before, run) in enumerate(pairwise(of.runs)):
        if run.build != before.build:
            shapes.append(line("aside", across(i) + 47 / last, 0, across(i) + 47 / last, 100))
    for i, one in enumerate(cells):
        if one is not None and one.limit is not None:
            y, half = 100 - up.at(one.limit), min(47 / last, 3)
            shapes.append(line("limit", across(i) - half, y, across(i) + half, y))
    known = [(i, c) for i, c in enumerate(cells) if c is not None]
    shapes.append(curve("rail", [(across(i), 100 - up.at(c.value or 0.0)) for i, c in known]))
    for i, one in known:
        bar = ""
        if one.interval:
            low, high = (100 - up.at(x) for x in one.interval)
            bar = line("bar", across(i), low, across(i), high)
        at = 100 - up.at(one.value or 0.0)
        shapes.append(toned(one.outcome.replace(" ", "-"), bar + mark(one.outcome, across(i), at)))
    shapes.append(text(f"limit {bound(cell)}", 100, "0", dy=-10, anchor="end"))
    label = (
        f"{cell_name(cell)} in {count(len(known), 'run')}: the newest value is "
        f"{of_cell(cell, cell.value)}, the limit {bound(cell)}."
    )
    ticks = [Tick(across(i), f"#{i + 1}") for i in range(len(cells))]
    share = cell.threshold is not None
    shown = [Tick(t.at, percent(_value(up, t.at))) for t in up.ticks(400)] if share else None
    return plot(
        label,
        _HEIGHT,
        shapes,
        across=spaced([ticks[-1], ticks[0], *ticks], WIDE),
        up=shown or up.ticks(400),
        titles=("run, newest last", f"{cell.unit or number_title(cell)}, log scale"),
    )


def _value(scale: Scale, at: float) -> float:
    return float(scale.low * (scale.high / scale.low) ** (at / 100))


def number_title(cell: CellVerdict) -> str:
    """What the vertical axis shows, if the cell has no unit."""
    return "share of tokens" if cell.threshold is not None else cell.metric
