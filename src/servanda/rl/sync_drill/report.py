# The result of a preflight sync test, and its transcript.

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from servanda.judgement.verdict import BlindSpot, html_of
from servanda.report.format import count, number
from servanda.report.html import Sheet, Story, board
from servanda.report.html_pictures import Markup, key
from servanda.rl.sync_drill.result import Baseline, Mark, Outcome, Part, PoisonResult, Response
from servanda.rl.sync_drill.stream import StreamNames
from servanda.rl.sync_drill.weight_groups import LAYER
from servanda.traces.serialization import to_plain

# The result of a preflight sync test as a page: a grid of layers and parameter groups.


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
    sheets = [_grid(result), *_wrong(result), *_updates(result), _measurements(result)]
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


def _updates(result: Preflight) -> Iterator[Sheet]:
    if result.updates:
        heads = ("changed at once", "response slope", "residual, noise floors", "result")
        rows = [
            (each.name, f"{each.follow:.2f}", number(each.residual), GLYPHS[each.mark])
            for each in result.updates
        ]
        yield Sheet("Updates of few values of all groups", "", "", heads, rows)


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


EXIT_CODES: dict[str, int] = {"holds": 0, "violated": 1, "inconclusive": 3}
GLYPHS: dict[Mark, str] = {"holds": "✓", "warns": "!", "violated": "✗", "unseen": "?"}
_SEEN: dict[Outcome, str] = {"holds": "✓", "violated": "✗", "inconclusive": "?"}
_WORST: tuple[Mark, ...] = ("violated", "unseen", "warns", "holds")
_WIDTH = 96
_CLOSER = 6  # most groups with details
_ALIKE = 0.5  # nats between two sides at equal weights; a larger gap is suspicious
# cause -> the next experiment
NEXT = {
    "sync_moves": "read back one tensor of each kind from the engine after a sync, and compare its "
    "name, shape and first values with the trainer's",
    "unfaithful": "sync the groups above one at a time, and read their tensors back from the "
    "engine; or pass longer rows as tokens=, for the response slopes of single tensors",
    "sparse_updates": "look at how the sync sends differences: their indices, the values that they "
    "are relative to, and the density below which it sends them",
    "late": "wait for the transfer before the sync returns, or repeat the sync before sampling",
    "stale_replicas": "score the same rows on each replica separately after a sync",
}


@dataclass(frozen=True)
class ReplicaResult:
    """The result of one server of several."""

    url: str
    outcome: Outcome
    cause: str
    sentence: str


@dataclass(frozen=True)
class Preflight:
    """The result of a preflight sync test; `str` is its transcript.

    Args:
        outcome: violated if any part of the sync is wrong; inconclusive if none is, but a group
            could not be judged.
        cause: the fault, a name in `diagnosis.CAUSES`; "" if there is none.
        sentence: the outcome as text.
        found: both sides before any change, and after a sync of unchanged weights.
        poison: both sides after all weights were randomised.
        groups: one response per group, in the order of the module.
        updates: one response per share of the values that were changed at once, up to the first
            that is wrong; empty if a group is.
        returned: mean |engine - engine before the test|, nats, after the last sync.
        back: whether that is within the engine's own noise; if not, the engine has perturbed
            weights, and the outcome is violated.
        back_late: number of further syncs until the restored weights arrived.
        syncs: number of syncs.
        tokens: tokens that each side scored each time.
        blind_spots: effects that the test did not cover, or could not detect.
        replicas: the result of each server, if there are several; the measurements are those of
            the first with this outcome.
        digests: what the digests that servers report of their weights show, one text a server.
        stream: the names that the sync sends, where it is a Stream.
    """

    outcome: Outcome
    cause: str
    sentence: str
    found: Baseline
    poison: PoisonResult
    groups: tuple[Response, ...]
    returned: float
    back: bool
    back_late: int
    syncs: int
    tokens: int
    seconds: float
    updates: tuple[Response, ...] = ()
    warnings: tuple[str, ...] = ()
    blind_spots: tuple[BlindSpot, ...] = ()
    replicas: tuple[ReplicaResult, ...] = ()
    digests: tuple[str, ...] = ()
    stream: StreamNames | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **to_plain(self), "exit_code": self.exit_code}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_html(self) -> str:
        """A page of HTML with the groups as a grid."""
        return page(self)

    def _repr_html_(self) -> str:
        """The transcript, and the page in a frame, so that its style stays its own."""
        frame = 'width="100%" height="600" style="border:0" title="Preflight sync test"'
        return f'{html_of(self)}<iframe {frame} srcdoc="{escape(self.to_html())}"></iframe>'


def _lines(result: Preflight) -> Iterator[str]:
    baseline, poison = result.found, result.poison
    if result.stream:
        yield from _of_stream(result.stream)
    yield (
        f"found    mean |Δ logp| {_nats(baseline.distance)} nats on {result.tokens:,} probe "
        f"tokens; after a sync of unchanged weights {_nats(baseline.idle)}"
    )
    if baseline.cast:
        yield f"         rounding the weights to {baseline.cast} explains the difference"
    yield (
        f"all      all weights randomised, one sync: mean |Δ logp| {_nats(poison.distance)} nats, "
        f"limit {_nats(poison.limit)} (noise floor {_nats(baseline.floor)})  {GLYPHS[poison.mark]}"
    )
    if poison.fresh is not None:
        yield f"         on tokens never scored before: {_nats(poison.fresh)}"
    if poison.shares:
        yield f"shares   of its rows whose loss exceeds this limit: {_shares(poison)}"
    if poison.shown:
        yield (
            f"         so does that of one of {len(poison.shown)} tensors: tried in the first, the "
            "middle and the last layer"
        )
    yield "groups   each perturbed alone; response slope of the engine (1: synced, 0: not synced)"
    blocks: dict[str, list[Response]] = {}
    for response in result.groups:
        blocks.setdefault(response.block, []).append(response)
    for line in _table([_cell(block) for block in blocks.values()]):
        yield f"         {line}"
    unclear = [
        response
        for response in result.groups
        if response.mark in ("warns", "violated")
        and (response.explained or not response.deaf_as_a_whole)
    ]
    for response in unclear[:_CLOSER]:
        yield f"         {_detail(response)}"
    if result.updates:
        shares = ", ".join(_cell([each]) for each in result.updates)
        yield f"updates  of few values of all groups at once: {shares}"
    for replica in result.replicas:
        yield f"replica  {replica.url} {_SEEN[replica.outcome]} {replica.sentence}"
    for digests in result.digests:
        yield f"digests  {digests}"
    for warning in result.warnings:
        yield f"warning  {warning}"
    for spot in result.blind_spots:
        yield f"untested {spot.text}"
    yield f"{result.outcome.upper()}: {result.sentence}"
    if result.cause in NEXT:
        yield f"next     {NEXT[result.cause]}"
    if result.outcome == "violated" and not baseline.moved_away and baseline.idle < _ALIKE:
        yield (
            "At equal weights no metric shows this fault: after a sync of unchanged weights "
            f"the two sides differ by {_nats(baseline.idle)} nats."
        )
    engine = f"engine within {_nats(result.returned)} nats of before"
    if not result.back:
        yield (
            f"ENGINE NOT AS BEFORE: its logprobs differ by {_nats(result.returned)} nats from "
            "those before the test, so it holds perturbed weights: reload them before sampling"
        )
        engine = "engine not as before"
    yield (
        f"weights restored bit for bit, {engine} · "
        f"{count(result.syncs, 'sync')} · exit {result.exit_code} · {result.seconds:.0f} s"
    )


def _shares(poison: PoisonResult) -> str:
    """The smallest shares that are seen, each with the kinds of matrices."""
    by: dict[float, list[str]] = {}
    for name, share in poison.shares.items():
        kind = LAYER.sub(r"\2", name).removesuffix(".weight")
        by.setdefault(share, []).append(kind.rpartition(".")[2])
    words = {1.0: "more than half of", 0.5: "half of", 0.25: "a quarter of", 0.125: "an eighth of"}
    of = "; ".join(f"{words[share]} {', '.join(kinds)}" for share, kinds in sorted(by.items()))
    return f"{of}, each of a middle layer"


def _of_stream(stream: StreamNames) -> Iterator[str]:
    yield f"stream   {count(stream.tensors, 'tensor')} of {stream.bytes / 1e6:,.1f} MB"
    for what, names in (
        ("trained, and never in it", stream.missing),
        ("in it, and none of the trainer's", stream.unknown),
        ("not as in the checkpoint (A)", stream.misplaced),
    ):
        if names:
            more = f" and {len(names) - _CLOSER} more" if len(names) > _CLOSER else ""
            yield f"         {what}: {', '.join(names[:_CLOSER])}{more}"


def _cell(responses: list[Response]) -> str:
    name = responses[0].block
    marks: list[Mark] = [response.mark for response in responses]
    worst: Mark = next(mark for mark in _WORST if mark in marks)
    follows = [r.follow for r in responses if not math.isnan(r.follow)]
    if not follows:
        return f"{name} {GLYPHS['unseen']} no effect"
    low, high = min(follows), max(follows)
    span = f"{low:.2f}" if len(responses) == 1 else f"{low:.2f}..{high:.2f}"
    lost = all(r.deaf_as_a_whole and not r.explained for r in responses)
    deaf = "  ← never reaches the engine" if lost else ""
    return f"{name} {GLYPHS[worst]} {span}{deaf}"


def _detail(response: Response) -> str:
    detail = (
        f"{response.name}: response slope {response.follow:.2f}, residual "
        f"{response.residual:.1f} x noise floor"
    )
    return f"{detail}; {remark(response)}"


def remark(response: Response) -> str:
    """What explains a response, or the parts with the lowest response slopes."""
    if response.mixed:
        return "some rows or calls use the new weights, others the old ones"
    if response.late:
        return f"synced after {count(response.late, 'more sync')}"
    if response.stopped:
        return "the engine did not change since the sync before"
    if response.lost:
        return f"not synced: {', '.join(response.lost[:4])}"
    if response.scale:
        return f"explained by {response.scale}"
    known = [part for part in response.parts if not math.isnan(part.follow)]
    low = sorted(known, key=lambda part: part.follow)[:3]
    parts = ", ".join(f"{p.name} {p.follow:.2f} ± {2 * p.spread:.2f}" for p in low)
    return "; ".join(filter(None, (f"unexplained: {response.left:.1f} x noise floor", parts)))


def _table(cells: list[str]) -> Iterator[str]:
    """Cells in columns; a cell with a remark ends its line."""
    width = max(len(cell.partition("  ←")[0]) for cell in cells) + 3
    columns = max(1, _WIDTH // width)
    line: list[str] = []
    for cell in cells:
        line.append(f"{cell:<{width}}")
        if "←" in cell or len(line) == columns:
            yield "".join(line).rstrip()
            line = []
    if line:
        yield "".join(line).rstrip()


def _nats(value: float) -> str:
    return f"{value:.2g}" if value else "0"
