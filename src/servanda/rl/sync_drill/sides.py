# The trainer, its engine and the sync between them, as called by the preflight test.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from servanda.errors import Interrupted, MeasurementError
from servanda.rl.sync_drill.parallel.process_group import ALONE, Ranks
from servanda.rl.sync_drill.parallel.shards import reshard
from servanda.rl.sync_drill.signals import Terminated, TimedOut, TimeLimit
from servanda.rl.sync_drill.stream import Stream, StreamNames, stream_names
from servanda.rl.sync_drill.trainee import Rows, Trainee, flat, train_scores
from servanda.runner.measurement import Progress, Watch
from servanda.theory.sampling import Floats

_CALLED = "sync is called without arguments, score and logprobs with a list of token id rows"


class Sides:
    """Both sides; every failure names the stage of the test.

    Args:
        rows: the probe tokens.
        total: planned number of syncs, for a progress callback.
        limit: time limit of each call.
        ranks: the processes of the trainer; the engine scores on rank 0.
    """

    def __init__(
        self,
        trainee: Trainee,
        rows: Rows,
        total: int,
        watch: Watch,
        limit: TimeLimit,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.limit = limit
        self.trainee, self.rows, self.total, self.watch = trainee, rows, total, watch
        self.stage = "as found"
        self.own_modes = trainee.logprobs is not None  # the trainer scores as it does in the run
        self.syncs = 0

    def train(self, rows: Rows | None = None) -> Floats:
        """The trainer's scores, [N], nats.

        Raises:
            MeasurementError: it raises, or returns no usable logprobs.
        """
        return self.ranks.call(self.train_here, rows or self.rows, self.stage, self.own_modes)[0]

    def train_here(self, rows: Rows, stage: str, own_modes: bool) -> Floats:
        """The same in this process; all of a sharded trainer run it, and rank 0's scores count."""
        self.stage = stage
        try:
            answer = self._called(
                lambda: train_scores(self.trainee, rows, own_modes), "the trainer's logprobs"
            )
        finally:
            reshard(self.trainee.module)
        return np.empty(0) if self.ranks.rank else flat(answer, rows, "the trainer", stage)

    def infer(self, rows: Rows | None = None) -> Floats:
        """The engine's scores, [N], nats.

        Raises:
            MeasurementError: it raises, or returns no usable logprobs.
        """
        rows = rows or self.rows
        # a copy: the callee may keep or change its argument
        copy = [[*row] for row in rows]
        answer = self._called(lambda: self.trainee.score(copy), "score")
        return flat(answer, rows, "the engine", self.stage)

    def sync(self) -> None:
        """The trainer's sync, once.

        Raises:
            MeasurementError: it raises.
        """
        self.total = max(self.total, self.syncs + 1)
        self.watch(Progress("preflight", self.syncs, self.total))
        self.ranks.call(self.sync_here, self.stage)
        self.syncs += 1
        self.watch(Progress("preflight", self.syncs, self.total))

    def sync_here(self, stage: str) -> None:
        """The sync in this process, together with all others."""
        self.stage = stage
        try:
            self._called(self.trainee.sync, "the sync")
        finally:
            reshard(self.trainee.module)

    def names_here(self) -> StreamNames | None:
        """The names in the stream of a sync that is one; nothing is loaded."""
        sync = self.trainee.sync
        if not isinstance(sync, Stream):
            return None
        named = self._called(lambda: stream_names(sync, self.trainee.module), "the stream")
        return cast("StreamNames", named)

    def again_here(self) -> str:
        """One more sync after a failure; what went wrong with it, "" for nothing."""
        return sync_again(self.trainee.sync, self.limit)

    def _called(self, call: Callable[[], object], what: str) -> object:
        return call_in_time(call, what, self.stage, self.limit)


def call_in_time(call: Callable[[], object], what: str, stage: str, limit: TimeLimit) -> object:
    """Call a function of the user.

    Raises:
        MeasurementError: it raises, or exceeds its time; the message names the stage.
    """
    try:
        with limit():
            return call()
    except TimedOut as error:
        raise MeasurementError(
            f"{stage}: {what} did not return within {limit.seconds:g} s",
            hint="check that the engine is alive; for a slow one raise --timeout SECONDS "
            "(timeout_s= in Python)",
        ) from error
    except MeasurementError as error:
        problem = error.problems[0]
        message = f"{stage}: {what} failed: {problem.message}"
        raise MeasurementError(message, hint=problem.hint) from error
    except Exception as error:
        hint = _CALLED if isinstance(error, TypeError) else ""
        message = f"{stage}: {what} raised {error_line(error)}"
        raise MeasurementError(message, hint=hint) from error


def sync_again(sync: Callable[[], object], limit: TimeLimit) -> str:
    """Sync once more after a failure; what went wrong with it, "" for nothing."""
    try:
        with limit():
            sync()
    except TimedOut:
        return f"did not return within {limit.seconds:g} s"
    except BaseException as error:
        return f"raised {error_line(error)}"
    return ""


def error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def with_state(error: BaseException, state: str) -> BaseException:
    """The same error with the state of weights and engine."""
    if isinstance(error, MeasurementError):
        problem = error.problems[0]
        return MeasurementError(f"{problem.message}\n  state: {state}", hint=problem.hint)
    if isinstance(error, KeyboardInterrupt | Terminated):
        return Interrupted(f"preflight was stopped\n  state: {state}")
    return error
