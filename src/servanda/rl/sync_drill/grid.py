# The result of a preflight sync test as a page: a grid of layers and parameter groups.

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from servanda.report.format import number
from servanda.report.html import Sheet, Story, board
from servanda.report.html_shapes import Markup, key
from servanda.rl.sync_drill.report import GLYPHS, NEXT, Preflight, remark
from servanda.rl.sync_drill.result import Part, Response

WHOLE = "whole model"
_STATES = {  # shape -> in words
    "holds": "synced",
    "violated": "not synced",
    "error": "out of range: arrives late, in part or changed",
    "inconclusive": "neither right nor clearly wrong",
    "unseen": "not tested: no effect on the trainer's scores",
}
_OF_GROUPS = {"holds": "holds", "warns": "inconclusive", "violated": "error", "unseen": "unseen"}
_LAYERS = re.compile(r"^layers\.(\d+)(?: \.\. layers\.(\d+))?$")  # a part that is one, or a bundle
_HEADS = ("group", "result", "response slope", "residual, noise floors", "details")


class Box(NamedTuple):
    """One box of the grid.

    Args:
        state: one of `_STATES`; slope: the response slope, NaN where it is not known.
    """

    state: str
    slope: float

    @classmethod
    def of(cls, response: Response) -> Box:
        lost = response.mark == "violated" and response.deaf
        return cls("violated" if lost else _OF_GROUPS[response.mark], response.follow)

    @classmethod
    def of_part(cls, part: Part, response: Response) -> Box:
        if part.unseen or math.isnan(part.follow):
            return cls("unseen", math.nan)
        lost = part.deaf or part.name in response.lost
        state = "violated" if lost else "error" if part.partly_deaf else "holds"
        return cls(state, part.follow)


def boxes(result: Preflight) -> dict[str, dict[str, Box]]:
    """Row -> column -> its box: the whole model and each layer; the kinds of groups.

    A class of norms, which is one group of all layers, has a box in each of them.
    """
    rows: dict[str, dict[str, Box]] = {}
    for response in result.groups:
        column = response.name
        row = WHOLE
        if response.layer is not None:
            row, column = f"{response.layer}", response.name.rpartition(".")[2]
        rows.setdefault(row, {})[column] = Box.of(response)
        for part in response.parts:
            found = _LAYERS.match(part.name) if response.layer is None else None
            for layer in range(int(found[1]), int(found[2] or found[1]) + 1) if found else ():
                rows.setdefault(f"{layer}", {})[column] = Box.of_part(part, response)
    order = sorted(rows, key=lambda row: -1 if row == WHOLE else int(row))
    return {row: rows[row] for row in order}


def page(result: Preflight) -> str:
    """A self-contained page: the grid, what is wrong, and the measurements."""
    glyph = {"holds": "✓", "violated": "✗"}.get(result.outcome, "?")
    head = f"{glyph} Preflight sync test: {result.outcome}"
    sheets = [_grid(result), *_wrong(result), _measurements(result)]
    return board(head, [Story(head, result.sentence, sheets)])


def _grid(result: Preflight) -> Sheet:
    rows = boxes(result)
    if not rows:
        return Sheet("Layers and groups", "No group was tested.")
    # the last row has the kinds of a layer, which are most of the grid
    columns = [*dict.fromkeys(name for row in reversed([*rows.values()]) for name in row)]
    columns.sort(key=lambda name: name in rows.get(WHOLE, {}))
    states = {box.state for row in rows.values() for box in row.values()}
    legend = "".join(key(state, f"{words} ") for state, words in _STATES.items() if state in states)
    note = "<br>The number is the response slope: 1 is synced, 0 is not synced. –: no such weights."
    heads = ("layer", *(Markup(escape(name).replace("_", "_<wbr>")) for name in columns))
    drawn = [(row, *(_drawn(boxes.get(name)) for name in columns)) for row, boxes in rows.items()]
    return Sheet("Layers and groups", Markup(legend + note), "", heads, drawn)


def _drawn(box: Box | None) -> str:
    if box is None:
        return "–"
    slope = "" if math.isnan(box.slope) else f"{box.slope:.2f}"
    hidden = f'<span class="unseen-text">{escape(_STATES[box.state])}</span>'
    return Markup(f"{key(box.state, slope)}{hidden}")


def _wrong(result: Preflight) -> Iterator[Sheet]:
    wrong = [response for response in result.groups if response.mark != "holds"]
    if not wrong:
        return
    rows = []
    for response in wrong:
        box = Box.of(response)
        slope = f"{response.follow:.2f} ± {2 * response.spread:.2f}"
        numbers = ("", "") if box.state == "unseen" else (slope, number(response.residual))
        details = "" if box.state == "unseen" else remark(response)
        if response.deaf_as_a_whole and not response.explained:
            details = "never reaches the engine"
        rows.append((response.name, key(box.state, _STATES[box.state]), *numbers, details))
    note = f"Next: {NEXT[result.cause]}." if result.cause in NEXT else ""
    yield Sheet("Groups that are not synced, or not known to be", note, "", _HEADS, rows)


def _measurements(result: Preflight) -> Sheet:
    found, poison = result.found, result.poison
    back = GLYPHS["holds" if result.back else "violated"]
    rows = [
        ("as found", number(found.distance), "", ""),
        ("after a sync of unchanged weights", number(found.idle), "", ""),
        ("noise floor", number(found.floor), "", ""),
        (
            "all weights randomised, one sync",
            number(poison.distance),
            number(poison.limit),
            GLYPHS[poison.mark],
        ),
        ("engine at the end against the start", number(result.returned), number(found.near), back),
    ]
    more = [*result.warnings, *(f"not tested: {spot.text}" for spot in result.blind_spots)]
    note = f"{result.tokens:,} probe tokens, {result.syncs} syncs. " + " ".join(
        f"{text[0].upper()}{text[1:]}." for text in more
    )
    heads = ("measurement", "mean |Δ logp|, nats", "limit", "result")
    return Sheet("Measurements", note, "", heads, rows)
