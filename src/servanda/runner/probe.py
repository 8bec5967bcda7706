# A probe: opens the kernels and times a few sequences, before an estimate is given.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from servanda.contract.identity import same_policy
from servanda.contract.model import Kernel
from servanda.engines.arrow import to_parquet, to_table
from servanda.engines.base import Engine
from servanda.judgement.admission import refuse_unfit
from servanda.judgement.clauses.base import DRAWS, FORMAT
from servanda.judgement.cost import Lengths, Probe
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.runner.measurement import Open, Progress, Watch
from servanda.runner.round_files import batch_of, in_order
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch, Trace

PROBED, PROBED_SLOW = 16, 8  # sequences; fewer where one takes longer than _SLOW_S
_SLOW_S = 0.5
_WARM = 2  # warm-up: the first call of a library has initialisation


@dataclass
class Engines:
    """Engines that are opened for a probe and reused by the measurement.

    A context manager: engines that were not taken are closed.
    """

    open_anew: Open
    opened: dict[str, tuple[Kernel, Engine]] = field(default_factory=dict)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        for _, engine in self.opened.values():
            engine.close()
        self.opened.clear()

    def get(self, kernel: Kernel, side: str) -> Engine:
        """The engine of a side, opened if needed; it stays owned here."""
        if side not in self.opened:
            self.opened[side] = (kernel, self.open_anew(kernel, side))
        return self.opened[side][1]

    def open(self, kernel: Kernel, side: str) -> Engine:
        """For `run.check(open=...)`: the engine of a side, which the caller closes."""
        if side in self.opened and _same(self.opened[side][0], kernel):
            return self.opened.pop(side)[1]
        return self.open_anew(kernel, side)


def _same(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels are equal, for contracts in different folders."""
    numbers = [kernel.model_dump(exclude={"model", "python", "title"}) for kernel in (a, b)]
    places = [(kernel.model, kernel.python) for kernel in (a, b)]
    files = [[Path(place or "").resolve() for place in both] for both in places]
    return numbers[0] == numbers[1] and files[0] == files[1]


def probe(plan: Plan, engines: Engines, watch: Watch) -> tuple[Lengths, Probe | None]:
    """Tokens of every prompt, and a few sequences of the first workload on every kernel.

    Raises:
        IdentityError: the kernels run different policies.
        MeasurementError: an engine failed.
    """
    kernels = plan.kernels
    watch(Progress("loading the kernels", 0, len(kernels)))
    opened = {side: engines.get(kernel, side) for side, kernel in kernels.items()}
    described = {side: engine.describe() for side, engine in opened.items()}
    watch(Progress("loading the kernels", len(kernels), len(kernels)))
    for side in [*described][1:]:
        same_policy(described["train"], described[side], side)
    ids = {s.name: encoded(s.corpus, opened["infer"], s.width) for s in plan.schedules}
    lengths = {name: [len(tokens) for tokens in lines] for name, lines in ids.items()}
    if not plan.schedules:
        return lengths, None
    first = plan.schedules[0]
    draws = bool(plan.scored(first.name))
    return lengths, _timed(first, ids[first.name], kernels, opened, draws)


def encoded(corpus: Corpus, engine: Engine, width: int | None = None) -> list[tuple[int, ...]]:
    """Token ids of every line, checked (`refuse_unfit`) if `width` new tokens are asked for."""
    prompts = corpus.prompts
    texts = iter(engine.encode([p.text for p in prompts if p.token_ids is None]))
    ids = [tuple(p.token_ids or next(texts)) for p in prompts]
    if width is not None:
        refuse_unfit(corpus, ids, width, [engine.describe()])
    return ids


def _timed(
    schedule: Schedule,
    ids: list[tuple[int, ...]],
    kernels: Mapping[str, Kernel],
    engines: Mapping[str, Engine],
    draws: bool,
) -> Probe:
    """Time sampling and scoring; `draws`: whether train samples too."""
    units = [u for i in range(schedule.rounds) for u in schedule.units(i)][: PROBED + _WARM]
    sampling, seed = schedule.workload.sampling.transform, schedule.seed
    own = kernels["train"].sampling or sampling
    seconds: dict[str, float] = {}
    disk: list[int] = []
    # a pack has only whole sequences, and needs no warm-up
    warm, rest = (units[:_WARM], units[_WARM:]) if len(units) > _WARM else (units, units)

    def timed(what: str, batch: Batch, verb: Callable[..., Trace], *options: object) -> Trace:
        start = time.perf_counter()
        trace = in_order(batch, verb, *options)
        seconds[what] = time.perf_counter() - start
        disk.append(len(to_parquet(to_table(trace))))
        return trace

    warm_batch = batch_of(warm, ids, schedule.width)
    start = time.perf_counter()
    early = in_order(warm_batch, engines["infer"].generate, sampling, seed)
    if time.perf_counter() - start > _SLOW_S * len(warm):
        rest = rest[:PROBED_SLOW]
    batch = batch_of(rest, ids, schedule.width)
    drawn = {}
    for side in [side for side in kernels if side not in ("train", FORMAT)]:
        draw = engines[side].generate
        if side != "infer":
            in_order(warm_batch, draw, sampling, seed)
        drawn[side] = timed(side, batch, draw, sampling, seed)
        if side == "infer":
            score, path = engines["train"].score, kernels["train"].path or "prefill"
            in_order(replace(warm_batch, continuations=early.continuations), score, own, path)
            given = replace(batch, continuations=drawn[side].continuations)
            timed("train", given, score, own, path)
            if FORMAT in engines:
                timed(FORMAT, given, engines[FORMAT].score, own, path)
    if draws:
        in_order(warm_batch, engines["train"].generate, own, seed)
        timed(DRAWS, batch, engines["train"].generate, own, seed)
    memory = {side: memory_of(engine) for side, engine in engines.items()}
    return Probe(
        sequences=len(rest),
        lengths=tuple(drawn["infer"].length_S.tolist()),
        seconds=seconds,
        memory_bytes={side: peak for side, peak in memory.items() if peak is not None},
        disk_bytes=sum(disk),
    )


def memory_of(engine: Engine) -> int | None:
    """The peak memory of an engine's process, in bytes; None if unknown."""
    pid = getattr(engine, "pid", None)
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
