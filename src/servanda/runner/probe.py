# A probe: the kernels opened, and a few sequences timed, before anything is promised.

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from servanda.contract.identity import Description, same_policy
from servanda.contract.model import Kernel
from servanda.engines.arrow import to_parquet, to_table
from servanda.engines.base import Engine
from servanda.judgement.clauses.base import DRAWS
from servanda.judgement.cost import Lengths, Probe
from servanda.judgement.schedule import Schedule
from servanda.runner.measurement import Open, Progress, Watch
from servanda.runner.round_files import in_order
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch, Trace

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

PROBED = 16  # sequences
_WARM = 2  # before the clock runs: the first call of a library does more than compute


@dataclass
class Engines:
    """Engines that were opened for a probe, and are handed on to the measurement.

    A context manager: what was not taken is closed.
    """

    open_anew: Open
    kept: dict[str, tuple[Kernel, Engine]] = field(default_factory=dict)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        for _, engine in self.kept.values():
            engine.close()
        self.kept.clear()

    def get(self, kernel: Kernel, side: str) -> Engine:
        """The engine of a side, opened now or before; it stays here."""
        if side not in self.kept:
            self.kept[side] = (kernel, self.open_anew(kernel, side))
        return self.kept[side][1]

    def open(self, kernel: Kernel, side: str) -> Engine:
        """For `run.check(open=...)`: the engine of a side, which the caller closes."""
        if side in self.kept and _same(self.kept[side][0], kernel):
            return self.kept.pop(side)[1]
        return self.open_anew(kernel, side)


def _same(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels are one, though their contracts lie in other folders."""
    numbers = [kernel.model_dump(exclude={"model", "python", "title"}) for kernel in (a, b)]
    places = [(kernel.model, kernel.python) for kernel in (a, b)]
    files = [[Path(place or "").resolve() for place in both] for both in places]
    return numbers[0] == numbers[1] and files[0] == files[1]


def probe(plan: Plan, engines: Engines, watch: Watch) -> tuple[Lengths, Probe | None]:
    """Tokens of every prompt, and a few sequences of the first workload on every kernel.

    Raises:
        IdentityError: the kernels are not one policy.
        MeasurementError: an engine failed.
    """
    kernels = {side: getattr(plan.contract.kernels, side) for side in ("train", "infer")}
    if plan.stable is not None:
        kernels["stable"] = plan.stable
    watch(Progress("loading the kernels", 0, len(kernels)))
    opened = {side: engines.get(kernel, side) for side, kernel in kernels.items()}
    described = {side: engine.describe() for side, engine in opened.items()}
    watch(Progress("loading the kernels", len(kernels), len(kernels)))
    _refuse_others(described)
    ids = {s.name: encoded(s.corpus, opened["infer"]) for s in plan.schedules}
    lengths = {name: [len(tokens) for tokens in found] for name, found in ids.items()}
    if not plan.schedules:
        return lengths, None
    first = plan.schedules[0]
    draws = bool(plan.scored(first.name))
    return lengths, _timed(first, ids[first.name], kernels, opened, draws)


def _refuse_others(described: Mapping[str, Description]) -> None:
    for side in [*described][1:]:
        same_policy(described["train"], described[side], side)


def encoded(corpus: Corpus, engine: Engine) -> list[tuple[int, ...]]:
    """Token ids of every line."""
    prompts = corpus.prompts
    texts = iter(engine.encode([p.text for p in prompts if p.token_ids is None]))
    return [tuple(p.token_ids or next(texts)) for p in prompts]


def _timed(
    schedule: Schedule,
    ids: list[tuple[int, ...]],
    kernels: Mapping[str, Kernel],
    engines: Mapping[str, Engine],
    draws: bool,
) -> Probe:
    """Draws and scores; `draws` says whether train answers the prompts as well."""
    units = [u for i in range(schedule.rounds) for u in schedule.units(i)][: PROBED + _WARM]
    sampling = schedule.workload.sampling.transform
    seconds: dict[str, float] = {}
    drawn: dict[str, Trace] = {}
    disk = 0

    def batch(some: slice, given: tuple[tuple[int, ...], ...] = ()) -> Batch:
        of = units[some]
        sequences = tuple(u.sequence for u in of)
        return Batch(sequences, tuple(ids[u.row] for u in of), schedule.width, given)

    # a pack knows whole sequences only, and needs no warming
    warm, rest = slice(0, _WARM), slice(_WARM, None)
    if len(units) <= _WARM:
        warm = rest = slice(None)
    for side in [side for side in kernels if side != "train"]:
        early = in_order(batch(warm), engines[side].generate, sampling, schedule.seed)
        start = time.perf_counter()
        drawn[side] = in_order(batch(rest), engines[side].generate, sampling, schedule.seed)
        seconds[side] = time.perf_counter() - start
        disk += len(to_parquet(to_table(drawn[side])))
        if side == "infer":
            own = kernels["train"].sampling or sampling
            path = kernels["train"].path or "prefill"
            in_order(batch(warm, early.continuations), engines["train"].score, own, path)
            again = batch(rest, drawn[side].continuations)
            start = time.perf_counter()
            scored = in_order(again, engines["train"].score, own, path)
            seconds["train"] = time.perf_counter() - start
            disk += len(to_parquet(to_table(scored)))
    if draws:
        own = kernels["train"].sampling or sampling
        in_order(batch(warm), engines["train"].generate, own, schedule.seed)
        start = time.perf_counter()
        answers = in_order(batch(rest), engines["train"].generate, own, schedule.seed)
        seconds[DRAWS] = time.perf_counter() - start
        disk += len(to_parquet(to_table(answers)))
    memory = {side: memory_of(engine) for side, engine in engines.items()}
    return Probe(
        sequences=len(units[rest]),
        lengths=tuple(drawn["infer"].length_S.tolist()),
        seconds=seconds,
        memory_bytes={side: peak for side, peak in memory.items() if peak is not None},
        disk_bytes=disk,
    )


def memory_of(engine: Engine) -> int | None:
    """The most memory that an engine's process held, in bytes; None where it cannot be known."""
    pid = getattr(engine, "pid", None)
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
