# The parts of a dump's steps, computed by this process or by several; the results have the same
# bits.

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from servanda.judgement.plan import Plan
from servanda.rl.dumps.blocks import blocks
from servanda.rl.dumps.checks import Soundness
from servanda.rl.dumps.formats import Dump
from servanda.rl.dumps.step_part import Measures, StepPart
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
        summation = summation or measures.of_step(block.step, number)
        sound.add(block)
        summation.add(block)
    return StepResult(summation.close() if summation else None, sound, read)


def of_step(measures: Measures, dump: Dump, step: int, number: int) -> StepResult:
    """Read and sum up one step."""
    read = dump.of([step])
    return of_blocks(measures, blocks(read.read_step(step)), number, read)


def results(measures: Measures, dump: Dump, jobs: int) -> Iterator[StepResult]:
    """The results of all steps in their order.

    Args:
        jobs: number of processes; 1: only this one.
    """
    steps = [(step, number) for number, step in enumerate(dump.steps, 1)]
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


def in_order(
    submit: Callable[..., Future[Any]], work: Callable[..., Any], of: Iterable[Any], ahead: int
) -> Iterator[Any]:
    """The results of work in the order of its arguments, with a bounded number begun."""
    begun: deque[Future[Any]] = deque()
    try:
        for arguments in of:
            begun.append(submit(work, *arguments))
            if len(begun) >= ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()


_worker: tuple[Measures, Dump] | None = None  # of a process that was started here


def _begin(plan: Plan, dump: Dump) -> None:
    global _worker
    _worker = Measures(plan), dump


def _of_step(step: int, number: int) -> StepResult:
    assert _worker is not None
    return of_step(*_worker, step, number)
