# The reference scorer: the train kernel, started on demand and restarted if it has died.
#
# It serves no user.  A batch that it rejects is split in halves, down to the rows that it cannot
# score, which get no logprob.  If it does not respond at all, no row is decided.

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

_NICE = 10  # process priority below all serving processes
_LOADING_S = 1800.0  # allowed for loading a large model


class DeadEngineError(MeasurementError):
    """The train engine has died and cannot be restarted now."""


class Referee:
    """The reference scorer: one train engine.

    Args:
        sampling: sampling parameters of the logprobs.
        admit: checks the engine's description; raises to refuse it.
        timeout_s: time after which an unresponsive engine is killed; loading may take half an hour.
        clock: monotonic seconds.

    `seconds`: total time of completed calls; a call that hangs or loads a model is not counted.
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
        """Load the engine if it is not loaded.

        Raises:
            MeasurementError: it does not respond, or is not an admissible kernel.
        """
        if self._ended:
            raise MeasurementError("the leader ends")
        if self._engine is not None:
            return
        engine = self._loading = self._open(self._kernel, "train")
        try:
            if self._ended:
                raise MeasurementError("the leader ends")
            with suppress(AttributeError, OSError):  # not every engine is a child process
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
        """Sequence -> logprobs of its tokens; sequences that could not be scored are left out.

        Raises:
            DeadEngineError: the engine has died and cannot be restarted now.
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
        # engines number sequences from 0 in order
        rows = replace(batch, sequence_S=tuple(range(len(batch))))
        began = self._clock()
        try:
            ask = lambda: in_order(rows, engine.score, self._sampling, path)  # noqa: E731
            trace = answered(self._timed(engine, ask, self._timeout_s), rows)
        except EvidenceError as error:  # its output is for other sequences
            raise MeasurementError(f"train: {error}") from None
        self.seconds += self._clock() - began
        record = self._contract.observability.record
        as_declared(trace, "train", self._kernel, path, self._sampling, described, record)
        if trace.continuations != rows.continuations:
            raise MeasurementError("the train kernel scored other tokens than requested")
        return trace

    def _timed(self, engine: Engine, call: Callable[[], Any], seconds: float) -> Any:
        """Call an engine; close it if the call takes too long."""
        timer = Timer(seconds, engine.close)
        timer.daemon = True
        timer.start()
        try:
            return call()
        finally:
            timer.cancel()

    def _revive(self, error: MeasurementError) -> None:
        """Restart a dead engine; one that is alive rejected the rows."""
        engine = self._engine
        if engine is None:  # it was closed meanwhile
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
        """Take over the engine of another scorer, which then has none."""
        self.close()
        self._engine, self.described, other._engine = other._engine, other.described, None

    def close(self) -> None:
        """Close the engine; it is restarted on demand."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def end(self) -> None:
        """Close the engine permanently, also while it is loading."""
        self._ended = True
        loading = self._loading
        if loading is not None:
            loading.close()
        self.close()
