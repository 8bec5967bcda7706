# The parts of a dump's steps, computed by this process, by several, or by a cluster; the results
# have the same bits.

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from servanda.errors import MeasurementError
from servanda.judgement.plan import Plan
from servanda.rl.dumps.checks import Soundness
from servanda.rl.dumps.formats import Dump
from servanda.rl.dumps.statistics import Measures, StepPart, StepSummation
from servanda.rl.dumps.storage import place
from servanda.rl.steps.blocks import blocks
from servanda.runner.ray_cluster import Cluster
from servanda.traces.rollouts import Rollouts

_AHEAD = 2  # steps per process that are begun before their turn: memory does not grow with a dump
_WORTH_BYTES = 64_000_000  # of a dump, from which more processes pay for their start


@dataclass(frozen=True)
class StepResult:
    """What one step adds to a dump.

    Args:
        part: its sums; None if it has no usable sequence.
        sound: its data quality checks.
        read: the step itself, with its rejected rows.
    """

    part: StepPart | None
    sound: Soundness
    read: Dump


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worthwhile(dump: Dump) -> int:
    """The number of processes that a dump is worth."""
    if dump.bytes < _WORTH_BYTES:
        return 1
    return min(cores(), len(dump.steps))


def of_blocks(
    measures: Measures, of_step: Iterable[Rollouts], number: int, read: Dump
) -> StepResult:
    """Sum up the blocks of one step.

    Args:
        number: of the step in the dump, from 1.
    """
    sound, summation = Soundness(), None
    for block in of_step:
        summation = summation or StepSummation(measures, block.step, number)
        sound.add(block)
        summation.add(block)
    return StepResult(summation.close() if summation else None, sound, read)


def of_step(measures: Measures, dump: Dump, step: int, number: int) -> StepResult:
    """Read and sum up one step."""
    read = dump.of([step])
    return of_blocks(measures, blocks(read.read_step(step)), number, read)


def results(
    measures: Measures, dump: Dump, jobs: int, cluster: Cluster | None = None
) -> Iterator[StepResult]:
    """The results of all steps in their order.

    Args:
        jobs: number of processes; 1: only this one.
        cluster: whose nodes compute the results, instead of processes.
    """
    steps = [(step, number) for number, step in enumerate(dump.steps, 1)]
    if cluster is not None:
        plan = pickle.dumps(measures.plan)
        # without the listing of a bucket, which would travel with each task
        bare = Dump(replace(dump.detection, folder=place(dump.detection.folder)))
        tasks = ((plan, bare.of([step]), step, number) for step, number in steps)
        yield from in_order(cluster.submit, of_step_on_node, tasks, cluster.ahead)
        return
    if jobs < 2 or len(steps) < 2:
        for step, number in steps:
            yield of_step(measures, dump, step, number)
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(steps)),
        # a fork of a process with threads, such as Arrow's, can hang
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(measures.plan, dump),
    )
    with pool:
        yield from in_order(pool.submit, _of_step, steps, _AHEAD * jobs)


class Begun(Protocol):
    """Work that was begun elsewhere."""

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


def in_order(
    submit: Callable[..., Begun], work: Callable[..., Any], of: Iterable[Any], ahead: int
) -> Iterator[Any]:
    """The results of work in the order of its arguments, with a bounded number begun."""
    begun: deque[Begun] = deque()
    try:
        for arguments in of:
            begun.append(submit(work, *arguments))
            if len(begun) >= ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for later in begun:
            later.cancel()


_worker: tuple[Measures, Dump] | None = None  # of a process that was started here


def _begin(plan: Plan, dump: Dump) -> None:
    global _worker
    _worker = Measures(plan), dump


def _of_step(step: int, number: int) -> StepResult:
    assert _worker is not None
    return of_step(*_worker, step, number)


def of_step_on_node(plan: bytes, dump: Dump, step: int, number: int) -> StepResult:
    """Sum up one step on a node of a cluster.

    Args:
        plan: pickled.
        dump: with this step only.

    Raises:
        MeasurementError: the node lacks a file, or cannot read it.
    """
    for path in dump.files:
        if isinstance(path, Path) and not path.exists():
            raise MeasurementError(
                f"{path} is not on node {socket.gethostname()}",
                hint="every node reads the dump itself: name a folder that all nodes share, or "
                "the URL of an object store",
            )
    return of_step(_measures(plan), dump, step, number)


@lru_cache(maxsize=1)
def _measures(plan: bytes) -> Measures:
    return Measures(pickle.loads(plan))
