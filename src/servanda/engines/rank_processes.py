# A kernel of several ranks as one engine: each call goes to all of them, and rank 0 answers.
#
# The ranks are workers that run the same code on the same tokens and meet in a process group (see
# transformers_parts.py).  One that is killed, or that fails alone, leaves the others waiting in a
# collective; so the first failure ends them all, under its own name.

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from servanda.contract.model import Kernel
from servanda.engines.worker import Worker
from servanda.errors import MeasurementError, Problem, ServandaError

T = TypeVar("T")

MEETING = "SERVANDA_RANKS_MEET"  # set in a process that is a rank: where all ranks find each other
_MOST = 1024  # ranks
# what follows from a rank's death is reported by the others within seconds, if at all
_ECHO_S = 5.0
_LOST = (
    "what was measured is kept: run the same command again to go on; if memory ran out, lower "
    "kernels.*.batch_size, or give the kernel more ranks"
)


def ranks_of(kernel: Kernel) -> int:
    """The number of ranks that a kernel asks for; 1 where it asks for none.

    Raises:
        MeasurementError: it is no number of processes.
    """
    ranks = (kernel.options or {}).get("ranks", 1)
    if type(ranks) is not int or not 1 <= ranks <= _MOST:
        raise MeasurementError(
            f"options.ranks is {ranks!r}, and a kernel has 1 to {_MOST} ranks",
            hint="write options: {ranks: 2}, or option.ranks=2 in a kernel string",
        )
    return ranks


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in environment and int(environment.get("WORLD_SIZE", 1)) > 1


def joined(kernel: Kernel, side: str) -> Worker:
    """`worker.spawn` where torchrun started this process: the kernel's rank of the same number.

    Every process makes the same calls in the same order, and has the same answers.

    Raises:
        MeasurementError: the kernel asks for another number of ranks.
    """
    ranks, started = ranks_of(kernel), int(os.environ["WORLD_SIZE"])
    if ranks != started:
        raise MeasurementError(
            f"torchrun started {started} processes, and the kernel has "
            f"{ranks if ranks > 1 else 'no'} ranks",
            hint=f"give the kernel options: {{ranks: {started}}} (option.ranks={started})",
        )
    return Worker(kernel, side, {MEETING: "env://"})


class ShardedEngine(Worker):
    """All ranks of a kernel on this machine."""

    def __init__(self, kernel: Kernel) -> None:
        count = ranks_of(kernel)
        if started_by_torchrun():
            raise MeasurementError(
                "torchrun started this process beside others, and each of them would start ranks",
                hint="run the command without torchrun, which starts them on this machine; on "
                "several, torchrun is for `servanda tools measure`",
            )
        self.kernel, self.side = kernel, "ranks"
        self._lost: MeasurementError | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="servanda-ranks-")
        meeting = (Path(self._folder.name) / "meeting").as_uri()
        self._workers: list[Worker] = []
        try:
            for rank in range(count):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
                environment = {MEETING: meeting, **{n: str(v) for n, v in numbers.items()}}
                self._workers.append(Worker(kernel, f"rank {rank} of {count}", environment))
            self._reply("open")  # a kernel that is refused is refused here, as by every engine
        except BaseException:
            self.close()
            raise
        self._loading = False

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _ask(self, verb: str, options: dict[str, Any] | None = None, body: bytes = b"") -> None:
        if self._lost is not None:
            raise self._lost
        self._at_once(lambda worker: worker._ask(verb, options, body))

    def _reply(self, verb: str) -> tuple[dict[str, Any], bytes]:
        return self._at_once(lambda worker: worker._reply(verb))[0]

    def _at_once(self, call: Callable[[Worker], T]) -> list[T]:
        """What each rank answers.

        Raises:
            MeasurementError: of a rank; unless all refuse the same, the ranks are ended.
        """
        with ThreadPoolExecutor(len(self._workers)) as pool:
            calls = [pool.submit(call, worker) for worker in self._workers]
            wait(calls, return_when=FIRST_EXCEPTION)
            first = _problems(calls)
            if not first:
                return [each.result() for each in calls]
            wait(calls, timeout=_ECHO_S)
            raise self._failure(first, _problems(calls))

    def _failure(self, first: Mapping[int, Problem], all_: Mapping[int, Problem]) -> Exception:
        """The error of a call, from what went wrong on its ranks, at first and a little later."""
        workers = self._workers
        died = {rank for rank in all_ if workers[rank]._process.poll() is not None}
        texts = {
            problem.message.removeprefix(f"{workers[r].side}: ") for r, problem in all_.items()
        }
        if not died and len(all_) == len(workers) and len(texts) == 1:
            return MeasurementError(texts.pop(), hint=all_[0].hint)
        rank = min(died & first.keys() or died or first)
        killed = (workers[rank]._process.poll() or 0) < 0
        hint = _LOST if killed else all_[rank].hint
        self._lost = MeasurementError(all_[rank].message, hint=hint)
        for worker in workers:  # those that wait for it in a collective would wait for long
            worker._process.kill()
        return self._lost


def _problems(calls: Sequence[Future[Any]]) -> dict[int, Problem]:
    """What went wrong so far, by rank."""
    found: dict[int, Problem] = {}
    for rank, call in enumerate(calls):
        error = call.exception() if call.done() else None
        if isinstance(error, ServandaError):
            found[rank] = error.problems[0]
        elif error is not None:
            raise error
    return found
