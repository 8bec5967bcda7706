# The processes of a sharded trainer in a preflight test: rank 0 decides, and every rank carries out
# the same calls on its own shard.
#
# Calls and answers travel in a process group of their own (gloo), whose waits end.  A signal waits
# until the call is over, since no rank may leave a collective alone.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn

from servanda.errors import Interrupted, MeasurementError, ServandaError
from servanda.rl.sync_drill.parallel.shards import is_sharded
from servanda.rl.sync_drill.parallel.zero3 import is_partitioned
from servanda.rl.sync_drill.signals import Signals, TimeLimit

T = TypeVar("T")
_LONGEST_S = 86_400.0  # wait for another rank where calls have no time limit
_MARGIN_S = 60.0  # for what a rank does between two calls
_END = "end"


@dataclass(frozen=True)
class _Answer:
    """What a call did on one rank; `seconds` until its end, `signals` that arrived meanwhile."""

    value: Any = None
    error: tuple[str, str] | None = None
    seconds: float = 0.0
    signals: tuple[int, ...] = ()


@dataclass
class Ranks:
    """The processes that have a part of the trainer.

    Args:
        rank, size: of this process, and their number.
        group: their process group; None for one process.
        signals: those of this process.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    signals: Signals = field(default_factory=Signals)
    lost: bool = False
    _waiting: list[tuple[str, list[tuple[Any, ...]]]] = field(default_factory=list)

    # rank 0

    def post(self, verb: Callable[..., Any], *arguments: Any) -> None:
        """Do something on every rank, on the others together with the next `call`."""
        self.post_each(verb, [arguments] * self.size, unpack=True)

    def post_each(
        self, verb: Callable[..., Any], arguments: Sequence[Any], *, unpack: bool = False
    ) -> None:
        """The same with an argument for each rank."""
        each = [given if unpack else (given,) for given in arguments]
        verb(*each[0])
        if self.group is not None:
            self._waiting.append((verb.__name__, each))

    def forget(self) -> None:
        """Drop what was posted and not yet called."""
        self._waiting = []

    def call(self, verb: Callable[..., T], *arguments: Any) -> list[T]:
        """Do something on every rank at the same time; the values of all ranks.

        Raises:
            MeasurementError: it raised on a rank, the first one counts; or a rank was lost.
            KeyboardInterrupt, Terminated: on any rank, unless signals are deferred.
        """
        if self.group is None or self.lost:
            return [verb(*arguments)]
        own: BaseException | None = None

        def here() -> T:
            nonlocal own
            try:
                return verb(*arguments)
            except BaseException as error:
                own = error
                raise

        with self.signals.held():
            waiting, self._waiting = self._waiting, []
            self._send([*waiting, (verb.__name__, [arguments] * self.size)])
            answers = self._gathered(_answer(here))
            for number in (number for answer in answers for number in answer.signals):
                self.signals.receive(number)
        failed = [(a.seconds, rank) for rank, a in enumerate(answers) if a.error]
        if failed:
            rank = min(failed)[1]
            if rank == 0 and own is not None:
                raise own
            message, hint = answers[rank].error or ("", "")
            raise MeasurementError(f"rank {rank}: {message}", hint=hint)
        return [answer.value for answer in answers]

    def lead(self, work: Callable[[], T]) -> T:
        """Run a test as rank 0; the others get its result or its error."""
        try:
            result = work()
        except BaseException as error:
            self._end(None, error)
            raise
        self._end(result, None)
        return result

    def _end(self, result: Any, error: BaseException | None) -> None:
        if self.group is None or self.lost:
            return
        text = None
        if error is not None:
            problem = error.problems[0] if isinstance(error, ServandaError) else None
            message = (
                problem.message if problem else f"rank 0 raised {type(error).__name__}: {error}"
            )
            text = (isinstance(error, Interrupted), message, problem.hint if problem else "")
        self.forget()
        with suppress(MeasurementError):
            self._send([(_END, [(result, text)] * self.size)])

    # the others

    def follow(self, verbs: Mapping[str, Callable[..., Any]], restore: Callable[[], None]) -> Any:
        """Carry out the calls of rank 0 until its test ends; its result.

        Args:
            restore: restores the weights, for the case that another rank is lost.

        Raises:
            MeasurementError, Interrupted: as on rank 0.
        """
        while True:
            try:
                calls = self._received()
                if calls[0][0] == _END:
                    break
                self._gathered(_answer(lambda calls=calls: self._done(calls, verbs), self.signals))
            except MeasurementError:
                restore()
                raise
        result, text = calls[0][1][self.rank]
        if text is None:
            return result
        is_interrupt, message, hint = text
        raise Interrupted(message) if is_interrupt else MeasurementError(message, hint=hint)

    def _done(self, calls: Sequence[Any], verbs: Mapping[str, Callable[..., Any]]) -> Any:
        value = None
        for name, arguments in calls:
            value = verbs[name](*arguments[self.rank])
        return value

    # the process group

    def _send(self, calls: list[Any]) -> None:
        from torch import distributed

        with self._connected():
            distributed.broadcast_object_list([calls], src=0, group=self.group)

    def _received(self) -> list[Any]:
        from torch import distributed

        box: list[Any] = [None]
        with self._connected():
            distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def _gathered(self, answer: _Answer) -> list[_Answer]:
        from torch import distributed

        box: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._connected():
            distributed.gather_object(answer, box, dst=0, group=self.group)
        return box or []

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.lost = True
            line = str(error).partition("\n")[0]
            raise MeasurementError(
                f"another rank of the {self.size} was lost, or did not answer in time: {line}",
                hint="see the output of the other ranks; every one has to call preflight",
            ) from error


ALONE = Ranks()


def _answer(call: Callable[[], Any], signals: Signals | None = None) -> _Answer:
    began = time.monotonic()
    value, text = None, None
    try:
        value = call()
    except ServandaError as error:
        text = (error.problems[0].message, error.problems[0].hint)
    except BaseException as error:
        text = (f"{type(error).__name__}: {error}", "")
    seconds = time.monotonic() - began
    return _Answer(value, text, seconds, signals.taken() if signals else ())


@contextmanager
def ranks_of(module: nn.Module | None, limit: TimeLimit) -> Iterator[Ranks]:
    """The processes of a sharded module: all of the default process group; of another module this
    process alone.  Without a module, the processes of the default process group, if there is one.

    Every wait for another rank ends, also in collectives of the trainer on gloo.

    Raises:
        MeasurementError: the other ranks do not take part.
    """
    from torch import distributed

    several = distributed.is_available() and distributed.is_initialized()
    if not (several if module is None else is_sharded(module)):
        yield Ranks()
        return
    seconds = limit.seconds or _LONGEST_S
    # rank 0 may score for as long as a call may take, after the longest call of another rank
    wait = timedelta(seconds=min(2 * seconds + _MARGIN_S, _LONGEST_S))
    try:
        group: Any = distributed.new_group(backend="gloo", timeout=wait)
    except RuntimeError as error:
        raise MeasurementError(
            f"the ranks do not meet for the preflight test: {str(error).partition(chr(10))[0]}",
            hint="call preflight on every rank of the process group",
        ) from error
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size(), group)
    try:
        with _limited(module, timedelta(seconds=seconds)):
            yield ranks
    finally:
        # closes the connections, so that a rank that still waits for this one learns of it
        distributed.destroy_process_group(group)


@contextmanager
def _limited(module: nn.Module | None, wait: timedelta) -> Iterator[None]:
    """End the waits of the trainer's own collectives: gloo's are not interrupted by a signal."""
    from torch.distributed import distributed_c10d as c10d

    groups = {id(group): group for group in _groups(module)}
    before: list[tuple[Any, timedelta]] = []
    for group in groups.values():
        backend = group._get_backend(torch.device("cpu")) if _is_gloo(group) else None
        if backend is not None and backend.options._timeout > wait:
            before.append((group, backend.options._timeout))
            c10d._set_pg_timeout(wait, group)
    try:
        yield
    finally:
        for group, timeout in before:
            c10d._set_pg_timeout(timeout, group)


def _is_gloo(group: Any) -> bool:
    from torch import distributed

    return distributed.get_backend(group) == "gloo"


def _groups(module: nn.Module | None) -> Iterator[Any]:
    from torch import distributed

    yield distributed.group.WORLD
    for parameter in module.parameters() if module is not None else ():
        if is_partitioned(parameter):
            yield parameter.ds_process_group  # pyright: ignore
        elif hasattr(parameter, "to_local"):
            yield from parameter.device_mesh.get_all_groups()  # pyright: ignore
