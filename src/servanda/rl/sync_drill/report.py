# The result of a preflight sync test, and its transcript.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from servanda.judgement.verdict import BlindSpot
from servanda.judgement.verdict_table import html_of
from servanda.report.format import count
from servanda.rl.sync_drill.result import Baseline, Mark, Outcome, PoisonResult, Response
from servanda.rl.sync_drill.stream import StreamNames
from servanda.traces.serialization import to_plain

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
        from servanda.rl.sync_drill.grid import page

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
