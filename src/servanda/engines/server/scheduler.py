# The queue before the engine, and the one thread that owns it.
#
# Jobs of one kind that come within `wait_s` of the oldest run together, up to `max_batch`.
# While a batch runs, others queue; between two of its steps short calls (encode, ...) are
# answered, so that a request does not wait for another's batch before it can queue.

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from servanda.engines.server.executor import Executor
from servanda.engines.server.jobs import Failed, Job
from servanda.errors import MeasurementError, ServandaError

T = TypeVar("T")
_ENDING = "the server is ending"


class QueueFullError(ServandaError):
    """More sequences wait than the queue takes."""


class Scheduler:
    """Runs jobs on an engine, in a thread of its own.

    Args:
        max_batch: sequences that run together at most.
        wait_s: how long the oldest job of a batch waits for company.
        places: sequences that may wait.
    """

    def __init__(self, engine: Any, *, max_batch: int, wait_s: float, places: int = 1024) -> None:
        self.executor = Executor(engine)
        self.max_batch, self.wait_s, self.places = max_batch, wait_s, places
        self._jobs: deque[tuple[float, Job]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._next: tuple[Any, Any, Future[None]] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def put(self, jobs: Sequence[Job]) -> None:
        """Queue all of them.

        Raises:
            QueueFullError: there is no place for them, and none was queued.
        """
        with self._changed:
            self._refuse_closing()
            if len(self._jobs) + len(jobs) > self.places:
                raise QueueFullError(
                    f"{len(self._jobs)} sequences wait already, and the queue takes {self.places}",
                    hint="ask again later",
                )
            now = time.monotonic()
            self._jobs.extend((now, job) for job in jobs)
            self._changed.notify()

    def drop(self, jobs: Sequence[Job]) -> None:
        """No one waits for them any more: their places are free, and a batch of none ends."""
        with self._changed:
            for job in jobs:
                job.dropped = True
            gone = set(map(id, jobs))
            self._jobs = deque(entry for entry in self._jobs if id(entry[1]) not in gone)

    def call(self, verb: Callable[..., T], *arguments: Any) -> Future[T]:
        """A short call of the engine, in its thread."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(verb(*arguments))
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            self._refuse_closing()
            self._calls.append(answer)
            self._changed.notify()
        return future

    async def run_by(self, engine: Any, aside: Any = None) -> None:
        """Let another engine run what begins from now on; done once no batch of before runs.

        Args:
            aside: runs the jobs that are set aside; None: they run as all the others.
        """
        done: Future[None] = Future()
        with self._changed:
            self._refuse_closing()
            self._next = (engine, aside, done)
            self._changed.notify()
        await asyncio.wrap_future(done)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def end(self) -> None:
        """End between two steps; running and waiting requests get an error."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends, and waits for the engine's thread."""
        self.end()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (jobs := self._together()) is not None:
            self._run(jobs)
        with self._changed:
            left = [job for _, job in self._jobs]
            self._jobs.clear()
            if self._next is not None:
                self._next[2].set_exception(MeasurementError(_ENDING))
        for job in left:
            job.emit(Failed(MeasurementError(_ENDING)))
        self._answer_calls()

    def _refuse_closing(self) -> None:
        if self._closing:
            raise MeasurementError(_ENDING)

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            steps: Iterator[None] = self.executor.run(jobs)
            for _ in steps:
                self._answer_calls()
                if self._closing:
                    raise MeasurementError(_ENDING)
                if all(job.dropped for job in jobs):
                    return
        except Exception as error:
            for job in jobs:
                job.emit(Failed(error))

    def _together(self) -> list[Job] | None:
        """The next batch, once it is full or has waited long enough; None at the end."""
        while True:
            self._answer_calls()
            with self._changed:
                if self._closing:
                    return None
                if self._next is not None:
                    self.executor.engine, self.executor.aside, done = self._next
                    self._next = None
                    done.set_result(None)
                found = self._alike()
                left_s = None
                if found:
                    left_s = self._jobs[0][0] + self.wait_s - time.monotonic()
                    if left_s <= 0 or len(found) == self.max_batch:
                        taken = set(map(id, found))
                        self._jobs = deque(e for e in self._jobs if id(e[1]) not in taken)
                        return found
                if not self._calls:
                    self._changed.wait(left_s)

    def _alike(self) -> list[Job]:
        """The oldest job and those that may run with it; no sequence number is twice in a batch."""
        found: dict[int, Job] = {}
        for _, job in self._jobs:
            if len(found) == self.max_batch:
                break
            if job.kind == self._jobs[0][1].kind and job.sequence not in found:
                found[job.sequence] = job
        return [*found.values()]

    def _answer_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
