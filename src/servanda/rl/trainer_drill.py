# The preflight sync test, from a trainer's own script.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.drill import preflight as _preflight
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.signals import TIMEOUT_S
from servanda.rl.sync_drill.trainee import Score, Trainee
from servanda.runner.measurement import Watch


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
) -> Preflight:
    """Test, before a run, whether every weight that the trainer updates reaches its engine.

    Args:
        trainer: a TRL trainer, a Trainee, or a torch module; a module needs `sync` and `score`.
        sync, score, tokens, logprobs: see Trainee.
        journal, seed, timeout_s, watch: see servanda.rl.sync_drill.drill.preflight.

    Raises:
        MeasurementError: an unsupported trainer, or as in that function.
        Interrupted: Ctrl-C or SIGTERM.
    """
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
