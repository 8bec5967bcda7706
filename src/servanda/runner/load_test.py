# Timing: blocks of requests, served sequentially while nothing else runs.
#
# A block is timed as served (without logprobs), and again with recorded logprobs, as in the rest of
# a run (law 10); if a limit is relative to the stable kernel, also on that one.  Every second block
# runs in the opposite order, A B C | C B A, so that a linear drift affects all equally.  The first
# block of a session is a warm-up and is discarded.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from servanda.contract.identity import digest_of
from servanda.engines.base import Engine
from servanda.errors import MeasurementError
from servanda.judgement.clauses.base import Interim
from servanda.judgement.clauses.service_level import (
    LOOKS,
    RECORDED,
    SERVED,
    STABLE,
    LoadOf,
    LoadRun,
    ServiceLevel,
)
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.runner.run_directory import RunDirectory
from servanda.theory.sampling import uniforms
from servanda.traces.corpus import joined
from servanda.traces.latency import Timing
from servanda.traces.serialization import from_plain
from servanda.traces.trace import Batch

Ids = tuple[int, ...]


def measure_timing(
    plan: Plan,
    run: RunDirectory,
    engines: Mapping[str, Engine],
    prompts: Mapping[str, Sequence[Ids]],
    watch: Callable[[int, int], None],
) -> dict[LoadOf, LoadRun]:
    """Timed blocks of every load, until its cells are decided or the last evaluation is reached.

    Args:
        engines: by side; no other work may run meanwhile.
        prompts: token ids of each workload's lines.
    """
    descriptions = {side: engine.describe() for side, engine in engines.items()}
    schedules = {s.name: s for s in plan.schedules}
    runs = {}
    for load, beside in plan.loads.items():
        sides = [SERVED, RECORDED, *([STABLE] if beside else [])]
        needed = ["infer", *([STABLE] if beside else [])]
        deaf = [side for side in needed if not descriptions[side].timed]
        if deaf:
            name = descriptions[deaf[0]].fingerprint.get("engine", "of that name")
            runs[load] = LoadRun(absent=f"the {deaf[0]} engine {name} cannot be timed")
            continue
        session = _Session(load, schedules[load.workload], prompts[load.workload], engines, sides)
        runs[load] = _until_decided(plan, run, session, watch)
    return runs


def _until_decided(
    plan: Plan, run: RunDirectory, session: _Session, watch: Callable[[int, int], None]
) -> LoadRun:
    blocks: list[Mapping[str, Timing]] = []
    result = LoadRun()
    for look in LOOKS:
        while len(blocks) < look:
            watch(len(blocks), look)
            number = len(blocks)
            name = f"timing/{session.load}/{number:06d}"
            data = run.cached_data(name, lambda: session.block(number))  # noqa: B023 - called now
            blocks.append({side: from_plain(Timing, timed) for side, timed in data.items()})
        result = LoadRun(tuple(blocks))
        if not _open(plan, session.load, result):
            break
    watch(len(blocks), len(blocks))
    return result


def _open(plan: Plan, load: LoadOf, result: LoadRun) -> bool:
    """Whether a counting cell of this load is undecided."""
    look = Interim(plan.alpha, plan.price_cells, 0, 0, part=plan.part)
    return any(
        cell.kind.judge(cell, [cell.kind.weigh(cell, {load: result})], None, look).open
        for cell in plan.cells
        if isinstance(cell.kind, ServiceLevel) and cell.kind.load == load and cell.clause.enforced
    )


@dataclass
class _Session:
    """A timing session of one load on warmed-up engines."""

    load: LoadOf
    schedule: Schedule
    ids: Sequence[Ids]
    engines: Mapping[str, Engine]
    sides: Sequence[str]
    warm: bool = False

    @property
    def _seed(self) -> int:
        return int(digest_of(["timing", self.schedule.seed])[:15], 16)

    def block(self, number: int) -> dict[str, Any]:
        """One block on every side, as plain data."""
        batch = self._batch(number)
        if not self.warm:
            for side in self.sides:
                self._timed(side, batch)
            self.warm = True
        order = self.sides if number % 2 == 0 else self.sides[::-1]
        timed = {side: asdict(self._timed(side, batch)) for side in order}
        return {side: timed[side] for side in self.sides}

    def _timed(self, side: str, batch: Batch) -> Timing:
        name = STABLE if side == STABLE else "infer"
        sampling = self.schedule.workload.sampling.transform
        timing = self.engines[name].time(batch, sampling, self._seed, side == RECORDED)
        seconds = (*timing.first_S, *timing.gap_N)
        sound = all(math.isfinite(s) and s >= 0 for s in seconds) and timing.wall >= 0
        if not sound or len(timing.first_S) != len(batch):
            raise MeasurementError(
                f"the {name} engine timed {len(timing.first_S)} of {len(batch)} requests, and its "
                f"seconds begin {seconds[:3]}",
                hint="Engine.time gives finite seconds >= 0, and a first token for each request",
            )
        return timing

    def _batch(self, number: int) -> Batch:
        """The requests of a block: random prompts with replacement, determined by the seed."""
        load, ids, seed = self.load, self.ids, self._seed
        start = number * load.concurrency
        draws = range(start, start + load.concurrency)
        rows = [int(uniforms(seed, "prompt", d, 1)[0] * len(ids)) for d in draws]
        n = load.prompt_tokens
        prompts = tuple(joined(ids, row, n) if n else ids[row] for row in rows)
        return Batch(tuple(draws), prompts, load.new_tokens)
