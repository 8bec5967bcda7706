# The preflight test of a stream alone, for trainers whose weights cannot be perturbed in place:
# some tensors are perturbed on their way to the engine, which must move, and come back.
#
# Without the trainer's own response the size of a movement is not predicted.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from servanda.errors import MeasurementError
from servanda.report.format import count
from servanda.rl.sync_drill.diagnosis import CAUSES
from servanda.rl.sync_drill.parallel.process_group import Ranks, ranks_of
from servanda.rl.sync_drill.report import EXIT_CODES
from servanda.rl.sync_drill.response_slope import RESOLUTION, distance
from servanda.rl.sync_drill.result import Outcome
from servanda.rl.sync_drill.sides import call_in_time, sync_again, with_state
from servanda.rl.sync_drill.signals import TimeLimit
from servanda.rl.sync_drill.stream import Stream, matched
from servanda.rl.sync_drill.trainee import Rows, Score, flat
from servanda.rl.sync_drill.weight_groups import weight_groups
from servanda.theory.sampling import Floats
from servanda.traces.serialization import to_plain

SIZES = (0.25, 4.0)  # perturbations, in spreads of each tensor; the second if the first is not seen
_MOVED = 5.0  # movement of an engine that received something, in its own noise
_BACK = 3.0  # and that came back
_SHOWN = 8  # misplaced tensors that are listed
_LATE = 2  # further syncs until it does


@dataclass(frozen=True)
class Movement:
    """What the engine did when some tensors of the stream were perturbed.

    Args:
        name: the tensors, such as layers.1.mlp, or one tensor.
        tensors: their names in the stream.
        moved: mean change of the engine's logprobs, nats; NaN where no noise could be added.
        left: the same after the next sync of unchanged weights.
        size: of the perturbation, in spreads.
        mark: moved and came back, late by one sync, not moved, or not tested.
    """

    name: str
    tensors: tuple[str, ...]
    moved: float
    left: float
    size: float
    mark: Literal["moved", "late", "not moved", "not tested"]


@dataclass(frozen=True)
class StreamPreflight:
    """The result of the preflight test of a stream; `str` is its transcript.

    Args:
        outcome: violated if a perturbation does not move the engine, or a clean sync does not
            bring it back; inconclusive if some tensors could not be tested.
        cause: misplaced, never_synced, late, deaf or not_returned; "" for none.
        noise: the engine's own: two scores, and two syncs of unchanged weights, nats.
        missing: trained parameters that never appear in the stream.
        misplaced: as `Stream.misplaced`.
        tensors, bytes: number and size of the streamed tensors.
    """

    outcome: Outcome
    cause: str
    sentence: str
    noise: float
    groups: tuple[Movement, ...]
    missing: tuple[str, ...]
    misplaced: tuple[str, ...]
    tensors: int
    bytes: int
    returned: float
    syncs: int
    tokens: int
    seconds: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **to_plain(self), "exit_code": self.exit_code}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def stream_preflight(
    stream: Stream,
    score: Score,
    rows: Rows,
    *,
    each: Literal["group", "tensor"] = "group",
    timeout_s: float | None,
) -> StreamPreflight:
    """Perturb each group of a stream, or each tensor, and see whether the engine moves and returns.

    Two syncs for each, three or four where something is wrong; the trainer's weights are not
    touched, and the last sync is of unchanged weights.

    Raises:
        MeasurementError: the stream is empty, the engine gives no usable logprobs, or a call
            raises or exceeds its time limit; the message says whether the engine was synced again.
        Interrupted: Ctrl-C or SIGTERM.
    """
    limit = TimeLimit(timeout_s)
    with ranks_of(None, limit) as ranks:
        drill = _StreamDrill(stream, score, rows, each, limit, ranks)
        if not ranks.rank:
            return ranks.lead(drill.run)
        calls = (
            stream.contents,
            stream.misplaced,
            stream.perturb,
            drill.sync_here,
            drill.again_here,
        )
        with ranks.signals:
            ranks.signals.shield()
            return ranks.follow({c.__name__: c for c in calls}, lambda: stream.perturb({}))


class _StreamDrill:
    def __init__(
        self,
        stream: Stream,
        score: Score,
        rows: Rows,
        each: str,
        limit: TimeLimit,
        ranks: Ranks,
    ) -> None:
        self.stream, self.score, self.rows, self.each = stream, score, rows, each
        self.limit, self.syncs, self.stage = limit, 0, "reading the stream"
        self.ranks = ranks

    def run(self) -> StreamPreflight:
        began = time.monotonic()
        with self.ranks.signals:
            try:
                return self._measured(began)
            except BaseException as error:
                self.ranks.signals.shield()
                raise self._ended(error) from error

    def _measured(self, began: float) -> StreamPreflight:
        sent = self.ranks.call(self.stream.contents)[0]
        if not sent:
            raise MeasurementError("the stream has no tensors", hint="pass the trainer's iterator")
        trained = [*self.stream.names]
        missing = [
            n for n, found in matched(trained, [*sent], self.stream.names).items() if not found
        ]
        misplaced = self.ranks.call(self.stream.misplaced)[0]
        self.stage = "sync of unchanged weights"
        self._sync()
        before_N, again_N = self._infer(), self._infer()
        self._sync()
        start_N = self._infer()
        noise = max(distance(before_N, again_N), distance(before_N, start_N), RESOLUTION)
        plain = [name for name, (_, _, is_plain) in sent.items() if is_plain]
        groups = weight_groups({name: [name] for name in sent})
        subjects = [(g.name, g.tensors) for g in groups]
        if self.each == "tensor":
            subjects = [(name, (name,)) for group in groups for name in group.tensors]
        moves = [
            self._movement(name, tensors, [t for t in tensors if t in plain], start_N, noise)
            for name, tensors in subjects
        ]
        returned = distance(self._infer(), start_N)
        outcome, cause, sentence = _judged(moves, missing, misplaced, returned, noise)
        return StreamPreflight(
            outcome=outcome,
            cause=cause,
            sentence=sentence,
            noise=noise,
            groups=tuple(moves),
            missing=tuple(missing),
            misplaced=misplaced,
            tensors=len(sent),
            bytes=sum(size for _, size, _ in sent.values()),
            returned=returned,
            syncs=self.syncs,
            tokens=sum(len(row) - 1 for row in self.rows),
            seconds=time.monotonic() - began,
        )

    def _movement(
        self,
        name: str,
        tensors: tuple[str, ...],
        plain: Sequence[str],
        start_N: Floats,
        noise: float,
    ) -> Movement:
        self.stage = f"perturbing {name}"
        if not plain:
            return Movement(name, tensors, float("nan"), 0.0, 0.0, "not tested")
        moved = left = size = 0.0
        for size in SIZES:
            self.ranks.post(self.stream.perturb, dict.fromkeys(plain, size))
            self._sync()
            moved = distance(self._infer(), start_N)
            self.ranks.post(self.stream.perturb, {})
            self._sync()
            left = distance(self._infer(), start_N)
            if moved > _MOVED * noise:
                break
            if left > _MOVED * noise:
                # the sync of the perturbed tensors arrives with the next one
                self._sync()
                rest = distance(self._infer(), start_N)
                return Movement(name, tensors, left, rest, size, "late")
        for _ in range(_LATE):
            if left <= _BACK * noise:
                break
            self._sync()
            left = distance(self._infer(), start_N)
        mark = "moved" if moved > _MOVED * noise else "not moved"
        return Movement(name, tensors, moved, left, size, mark)

    def _sync(self) -> None:
        self.ranks.call(self.sync_here, self.stage)
        self.syncs += 1

    def sync_here(self, stage: str) -> None:
        """The sync in this process, together with all others."""
        self.stage = stage
        self._called(self.stream, "the sync")

    def again_here(self) -> str:
        """A sync of unchanged weights after a failure; what went wrong with it, "" for nothing."""
        self.stream.perturb({})
        return sync_again(self.stream, self.limit)

    def _infer(self) -> Floats:
        answer = self._called(lambda: self.score([[*row] for row in self.rows]), "score")
        return flat(answer, self.rows, "the engine", self.stage)

    def _called(self, call: Callable[[], Any], what: str) -> Any:
        return call_in_time(call, what, self.stage, self.limit)

    def _ended(self, error: BaseException) -> BaseException:
        """The error, with the state of the engine after one more sync of unchanged weights."""
        self.ranks.forget()
        state = "the weights are untouched, and the engine was not synced"
        if self.syncs:
            became = "was not possible"
            if not self.ranks.lost:
                became = next(filter(None, self.ranks.call(self.again_here)), "")
            state = "unchanged weights were synced to the engine once more"
            if became:
                state = (
                    f"one more sync {became}: the engine may hold perturbed weights, so do not "
                    "sample from it before a sync succeeds"
                )
        return with_state(error, state)


def _judged(
    moves: Sequence[Movement],
    missing: Sequence[str],
    misplaced: Sequence[str],
    returned: float,
    noise: float,
) -> tuple[Outcome, str, str]:
    still = [move.name for move in moves if move.mark == "not moved"]
    late = [move.name for move in moves if move.mark == "late"]
    untested = [move.name for move in moves if move.mark == "not tested"]
    seen = len(moves) - len(untested)
    if missing:
        return "violated", "deaf", f"trained, and never in the stream: {_few(missing)}"
    if misplaced:
        return "violated", "misplaced", f"{CAUSES['misplaced']} ({count(len(misplaced), 'tensor')})"
    if still and len(still) == seen:
        return "violated", "never_synced", CAUSES["never_synced"]
    if late and len(late) == seen:
        return "violated", "late", CAUSES["late"]
    if still or late:
        which = f"{len(still) + len(late)} of {len(moves)}: {_few([*still, *late])}"
        return (
            "violated",
            "deaf" if still else "dropped",
            (f"perturbed in the stream, and the engine does not move with it ({which})"),
        )
    if returned > _BACK * noise:
        return "violated", "not_returned", CAUSES["not_returned"]
    if untested:
        return "inconclusive", "", f"no noise can be added to {_few(untested)}"
    return "holds", "", f"the engine moves with each of {len(moves)}, and comes back"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _lines(result: StreamPreflight) -> Iterator[str]:
    size = result.bytes / 1e6
    yield (
        f"stream   {count(result.tensors, 'tensor')} of {size:,.1f} MB; the engine's own noise "
        f"{result.noise:.2g} nats on {result.tokens:,} probe tokens"
    )
    for name in result.missing:
        yield f"missing  {name} is trained, and never in the stream"
    for sentence in result.misplaced[:_SHOWN]:
        yield f"wrong    {sentence}"
    if len(result.misplaced) > _SHOWN:
        yield f"         and {len(result.misplaced) - _SHOWN} more"
    yield "groups   perturbed in the stream: change of the engine, and after a clean sync, nats"
    for move in result.groups:
        numbers = "" if move.mark == "not tested" else f" {move.moved:.2g}, then {move.left:.2g}"
        glyph = {"moved": "✓", "not tested": "?"}.get(move.mark, "✗")
        remark = "" if move.mark == "moved" else f"  ← {move.mark}"
        yield f"         {move.name} {glyph}{numbers}{remark}"
    yield (
        "untested the size of each movement: without the trainer's own response a factor, a "
        "rounding, or one lost tensor of a group that moves goes unnoticed"
    )
    yield f"{result.outcome.upper()}: {result.sentence}"
    yield (
        f"trainer untouched, engine within {result.returned:.2g} nats of before · "
        f"{count(result.syncs, 'sync')} · exit {result.exit_code} · {result.seconds:.0f} s"
    )
