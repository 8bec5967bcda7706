# The referee: the train kernel, begun when it is needed and again when it is dead.
#
# It serves nobody.  A batch that it refuses is tried by halves, down to the rows that it cannot
# score, which have no number then; where it does not answer at all, nothing is decided of a row.

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Contract
from servanda.engines.base import Engine
from servanda.errors import EvidenceError, MeasurementError
from servanda.judgement.admission import as_declared, path_of, refuse_unscored
from servanda.runner.measurement import Open
from servanda.runner.round_files import in_order
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace, answered

_NICE = 10  # below everything that serves
_LOADING_S = 1800.0  # that a large model may take to load, at least


class DeadEngineError(MeasurementError):
    """Train is dead, and cannot be begun again now."""


class Referee:
    """One train engine.

    Args:
        sampling: that logprobs are asked for.
        admit: refuses what the engine says of itself, by an error.
        timeout_s: after which an engine that does not answer is killed; one that loads may take
            half an hour.
        clock: seconds that only go forward.

    `seconds`: of calls that were answered; who waits for one that hangs, or loads, scores nothing.
    """

    def __init__(
        self,
        contract: Contract,
        sampling: Sampling,
        open_: Open,
        admit: Callable[[Description], None],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._clock, self.seconds = clock, 0.0
        self._contract, self._open, self._admit = contract, open_, admit
        self._kernel = contract.kernels.train
        self._sampling = self._kernel.sampling or sampling
        self._timeout_s, self._ended = timeout_s, False
        self._engine: Engine | None = None
        self._loading: Engine | None = None
        self.described: Description | None = None
        self.errors = self.restarts = 0

    @property
    def alive(self) -> bool:
        return self._engine is not None

    def start(self) -> None:
        """Load it, where it is not.

        Raises:
            MeasurementError: it does not answer, or says to be what it may not be.
        """
        if self._ended:
            raise MeasurementError("the leader ends")
        if self._engine is not None:
            return
        engine = self._loading = self._open(self._kernel, "train")
        try:
            if self._ended:
                raise MeasurementError("the leader ends")
            with suppress(AttributeError, OSError):  # not every engine is a child
                os.setpriority(os.PRIO_PROCESS, engine.pid, _NICE)  # type: ignore[attr-defined]
            loading_s = max(self._timeout_s, _LOADING_S)
            described: Description = self._timed(engine, engine.describe, loading_s)
            refuse_unscored(self._kernel, described)
            self._admit(described)
            self._engine, self.described = engine, described
        except BaseException:
            engine.close()
            raise
        finally:
            self._loading = None

    def score(self, batch: Batch) -> dict[int, NDArray[np.float64]]:
        """Sequence -> logprobs of its tokens; one that could not be scored is left out.

        Raises:
            DeadEngineError: it is dead, and cannot be begun again now.
        """
        try:
            trace = self._once(batch)
        except MeasurementError as error:
            self.errors += 1
            self._revive(error)
            if len(batch) == 1:
                return {}
            middle = len(batch) // 2
            left, right = (range(middle), range(middle, len(batch)))
            return {**self.score(batch.take(left)), **self.score(batch.take(right))}
        parts = np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])
        pairs = zip(batch.sequence_S, parts, strict=True)
        return {row: logp for row, logp in pairs if not np.isnan(logp).all()}

    def _once(self, batch: Batch) -> Trace:
        engine, described = self._engine, self.described
        assert engine is not None and described is not None
        path = path_of(self._kernel, "train")
        # engines number sequences from 0, in order
        rows = replace(batch, sequence_S=tuple(range(len(batch))))
        began = self._clock()
        try:
            ask = lambda: in_order(rows, engine.score, self._sampling, path)  # noqa: E731
            trace = answered(self._timed(engine, ask, self._timeout_s), rows)
        except EvidenceError as error:  # it speaks of other sequences
            raise MeasurementError(f"train: {error}") from None
        self.seconds += self._clock() - began
        record = self._contract.observability.record
        as_declared(trace, "train", self._kernel, path, self._sampling, described, record)
        if trace.continuations != rows.continuations:
            raise MeasurementError("train scored other tokens than it was given")
        return trace

    def _timed(self, engine: Engine, call: Callable[[], Any], seconds: float) -> Any:
        """A call of an engine, which is closed where it takes too long."""
        timer = Timer(seconds, engine.close)
        timer.daemon = True
        timer.start()
        try:
            return call()
        finally:
            timer.cancel()

    def _revive(self, error: MeasurementError) -> None:
        """Begin a dead engine again; one that lives refused the rows."""
        engine = self._engine
        if engine is None:  # it was ended in between
            raise DeadEngineError(f"{error}; the leader ends")
        try:
            self._timed(engine, engine.describe, self._timeout_s)
            return
        except (MeasurementError, OSError, ValueError):
            self.close()
        self.restarts += 1
        try:
            self.start()
        except MeasurementError as again:
            raise DeadEngineError(f"{error}; {again}") from None

    def adopt(self, other: Referee) -> None:
        """Take over the engine of another one, which has none then."""
        self.close()
        self._engine, self.described, other._engine = other._engine, other.described, None

    def close(self) -> None:
        """End the engine; it is begun again when it is needed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def end(self) -> None:
        """End the engine for good, also one that is just being loaded."""
        self._ended = True
        loading = self._loading
        if loading is not None:
            loading.close()
        self.close()
