# The preflight sync test, from a trainer's own script.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.drill import preflight as _preflight
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.signals import TIMEOUT_S
from servanda.rl.sync_drill.stream import Stream
from servanda.rl.sync_drill.stream_drill import StreamPreflight, stream_preflight
from servanda.rl.sync_drill.trainee import Score, Trainee, checked_rows
from servanda.runner.measurement import Watch


@overload
def preflight(
    trainer: Stream,
    *,
    score: Score,
    tokens: Sequence[Sequence[int]],
    each: Literal["group", "tensor"] = "group",
    timeout_s: float | None = TIMEOUT_S,
) -> StreamPreflight: ...


@overload
def preflight(
    trainer: Any,
    *,
    sync: Any = None,
    score: Score | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    logprobs: Score | None = None,
    journal: str | Path | None = None,
    seed: int = 0,
    timeout_s: float | None = TIMEOUT_S,
    watch: Watch | None = None,
) -> Preflight: ...


def preflight(
    trainer: Any,
    *,
    sync: Any = None,
    score: Score | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    logprobs: Score | None = None,
    journal: str | Path | None = None,
    seed: int = 0,
    timeout_s: float | None = TIMEOUT_S,
    watch: Watch | None = None,
    each: Literal["group", "tensor"] = "group",
) -> Preflight | StreamPreflight:
    """Test, before a run, whether every weight that the trainer updates reaches its engine.

    Args:
        trainer: a TRL trainer, a Trainee, or a torch module, which needs `sync` and `score`; or a
            Stream, which needs `score` and `tokens`, for a trainer whose weights cannot be changed
            in place.
        sync, score, tokens, logprobs: see Trainee.
        journal, seed, timeout_s, watch: see servanda.rl.sync_drill.drill.preflight.
        each: of a Stream: whether groups or single tensors are perturbed; two syncs for each.

    Raises:
        MeasurementError: an unsupported trainer, or as in that function.
        Interrupted: Ctrl-C or SIGTERM.
    """
    if isinstance(trainer, Stream):
        if score is None or tokens is None:
            raise MeasurementError(
                "a Stream needs score= and tokens=",
                hint="see docs/how-to/preflight.md; nothing was synced",
            )
        rows = checked_rows(tokens, None)
        return stream_preflight(trainer, score, rows, each=each, timeout_s=timeout_s)
    if sync is not None or score is not None:
        if sync is None or score is None:
            missing = "sync" if sync is None else "score"
            raise MeasurementError(
                f"a module needs both sync= and score=, and {missing}= is missing",
                hint="see docs/how-to/preflight.md",
            )
        trainee = Trainee(trainer, sync, score, tokens, logprobs)
    else:
        trainee = trainee_of(trainer)
    return _preflight(trainee, journal=journal, seed=seed, timeout_s=timeout_s, watch=watch)


def trainee_of(trainer: Any) -> Trainee:
    """A Trainee unchanged, or the Trainee of a TRL trainer.

    Raises:
        MeasurementError: neither of both.
    """
    if isinstance(trainer, Trainee):
        return trainer
    if any(kind.__module__.split(".")[0] == "trl" for kind in type(trainer).__mro__):
        from servanda.rl import trl

        return trl.trainee(trainer)
    raise MeasurementError(
        f"{type(trainer).__name__} is neither a Trainee nor a TRL trainer",
        hint="pass servanda.rl.Trainee(module, sync, score)",
    )
