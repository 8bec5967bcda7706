# The trainer, its engine and the sync between them, as called by the preflight test.

from __future__ import annotations

from collections.abc import Callable

from servanda.errors import Interrupted, MeasurementError
from servanda.rl.sync_drill.signals import Terminated, TimedOut, TimeLimit
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
    """

    def __init__(
        self, trainee: Trainee, rows: Rows, total: int, watch: Watch, limit: TimeLimit
    ) -> None:
        self.limit = limit
        self.trainee, self.rows, self.total, self.watch = trainee, rows, total, watch
        self.stage = "as found"
        self.syncs = 0

    def train(self, rows: Rows | None = None) -> Floats:
        """The trainer's scores, [N], nats.

        Raises:
            MeasurementError: it raises, or returns no usable logprobs.
        """
        rows = rows or self.rows
        answer = self._called(lambda: train_scores(self.trainee, rows), "the trainer's logprobs")
        return flat(answer, rows, "the trainer", self.stage)

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
        self._called(self.trainee.sync, "the sync")
        self.syncs += 1
        self.watch(Progress("preflight", self.syncs, self.total))

    def _called(self, call: Callable[[], object], what: str) -> object:
        try:
            with self.limit():
                return call()
        except TimedOut as error:
            raise MeasurementError(
                f"{self.stage}: {what} did not return within {self.limit.seconds:g} s",
                hint="check that the engine is alive; for a slow one raise --timeout SECONDS "
                "(timeout_s= in Python)",
            ) from error
        except MeasurementError as error:
            problem = error.problems[0]
            message = f"{self.stage}: {what} failed: {problem.message}"
            raise MeasurementError(message, hint=problem.hint) from error
        except Exception as error:
            hint = _CALLED if isinstance(error, TypeError) else ""
            message = f"{self.stage}: {what} raised {error_line(error)}"
            raise MeasurementError(message, hint=hint) from error


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
