# Service levels: latency and throughput under a stated load.
#
# An estimate, never a certificate: the interval is a bootstrap over blocks of requests that ran
# together, and a machine's speed changes over time.  So the cells have no e-value and take no share
# of alpha, but they can fail a contract.  They are evaluated three times, each at a third of alpha,
# to correct for early stopping; on one step of a promotion `violated` has that step's share.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from servanda.contract.clause import Clause, Relative
from servanda.judgement.clauses.base import (
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Source,
    blank,
    limit_of,
)
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.block_bootstrap import Blocks, block_interval, level
from servanda.traces.trace import Timing

LOOKS = (10, 20, 40)  # blocks; the first is the minimum for a judgement, the last the maximum
SERVED, RECORDED, STABLE = "infer", "recorded", "stable"  # kinds of timed requests in a block


@dataclass(frozen=True)
class Metric:
    """A quantity of served requests, and its computation from a block."""

    unit: str
    units: str  # unit of its sample size
    values: Callable[[Timing], tuple[float, ...]]


TIMINGS: Mapping[str, Metric] = MappingProxyType(
    {
        "time_to_first_token_seconds": Metric("s", "requests", lambda t: t.first_S),
        "inter_token_latency_seconds": Metric("s", "tokens", lambda t: t.gap_N),
        # none if the clock of the block did not advance
        "tokens_per_second": Metric(
            "1/s", "blocks", lambda t: (t.tokens / t.wall,) if t.wall else ()
        ),
    }
)


@dataclass(frozen=True)
class LoadOf:
    """The load of a clause: `concurrency` requests at once, from a workload's prompts.

    Args:
        workload: source of the prompts; new_tokens: most per request; prompt_tokens: length to
            which prompts are cut or joined, None: unchanged.
    """

    workload: str
    concurrency: int
    new_tokens: int
    prompt_tokens: int | None = None

    @classmethod
    def of(cls, clause: Clause, workload: str, new_tokens: int) -> LoadOf:
        load = load_data(clause)
        return cls(
            workload,
            load["concurrency"],
            load.get("new_tokens") or new_tokens,
            load.get("prompt_tokens"),
        )

    def __str__(self) -> str:
        prompt = f"-p{self.prompt_tokens}" if self.prompt_tokens else ""
        return f"{self.workload}-c{self.concurrency}-n{self.new_tokens}{prompt}"


def load_data(clause: Clause) -> Mapping[str, Any]:
    """A clause's load as a mapping; empty without one."""
    load: Any = clause.load or {}
    return load if isinstance(load, Mapping) else vars(load)


@dataclass(frozen=True)
class LoadRun:
    """The timed blocks of one load; each has SERVED and RECORDED, and STABLE if needed.

    Args:
        absent: the reason if an engine cannot be timed.
    """

    blocks: tuple[Mapping[str, Timing], ...] = ()
    absent: str = ""


@dataclass(frozen=True)
class Samples:
    """A metric's values, block by block: as served, while recorded, and on stable."""

    served: Blocks = ()
    recorded: Blocks = ()
    stable: Blocks = ()
    absent: str = ""

    def first(self, n: int) -> Samples:
        return Samples(self.served[:n], self.recorded[:n], self.stable[:n])


@dataclass(frozen=True)
class ServiceLevel(Kind):
    """A limit on an aggregate over requests, judged on the served path."""

    load: LoadOf = field()  # type: ignore[assignment] - narrower, and without a default
    seed: int
    source: ClassVar[Source] = "timing"
    offline_only: ClassVar[str] = "requests are timed offline, under a load of the contract's own"

    words: ClassVar[Mapping[str, str]] = {
        "holds": "the interval of the value is within the limit: an estimate of this machine",
        "violated": "it exceeds the limit",
    }

    def weigh(self, cell: Cell, runs: Mapping[LoadOf, LoadRun]) -> Samples:
        run = runs[self.load]
        values = TIMINGS[cell.clause.metric].values
        blocks = [{side: values(timing) for side, timing in b.items()} for b in run.blocks]
        # a block whose requests all ended at their first token has no inter-token time
        blocks = [b for b in blocks if all(b.values())]
        served, recorded = (tuple(b[side] for b in blocks) for side in (SERVED, RECORDED))
        stable = tuple(b[STABLE] for b in blocks) if self.peers else ()
        return Samples(served, recorded, stable, run.absent)

    def judge(
        self, cell: Cell, rounds: list[Samples], floor: float | None, look: Interim
    ) -> CellVerdict:
        samples = rounds[0] if rounds else Samples()
        if samples.absent:
            outcome = "inconclusive" if cell.clause.required else "not applicable"
            return blank(cell, outcome, samples.absent)
        n = len(samples.served)
        verdict = blank(
            cell,
            "inconclusive",
            f"{n} timed blocks have a value; an answer needs {LOOKS[0]}",
            kind="estimate",
            open=True,
        )
        for blocks in (b for b in LOOKS if b <= n):
            verdict = self._at(cell, samples.first(blocks), look)
            if verdict.outcome != "inconclusive":
                break
        return verdict

    def _at(self, cell: Cell, samples: Samples, look: Interim) -> CellVerdict:
        clause, metric = cell.clause, TIMINGS[cell.clause.metric]
        at_most = clause.at_least is None
        scale, limit = self._scale(cell, samples)
        (low, high), (least, most) = (
            [
                end * scale
                for end in block_interval(
                    samples.served,
                    clause.percentile,
                    shared(shared(alpha, len(LOOKS)), 2),
                    self.seed,
                    samples.stable,
                )
            ]
            for alpha in (look.alpha, look.alpha * look.part)
        )
        holds, fails = (high <= limit, least > limit) if at_most else (low >= limit, most < limit)
        n = len(samples.served)
        return blank(
            cell,
            "holds" if holds else "violated" if fails else "inconclusive",
            self._note(cell, samples, undecided=not (holds or fails)),
            kind="estimate",
            unit=metric.unit,
            value=level(samples.served, clause.percentile),
            interval=(low, high),
            limit=limit,
            stable=level(samples.stable, clause.percentile) if samples.stable else None,
            n=sum(map(len, samples.served)),
            units=metric.units,
            alpha=look.alpha,
            open=not (holds or fails) and n < LOOKS[-1],
        )

    def _scale(self, cell: Cell, samples: Samples) -> tuple[float, float]:
        """The factor from interval ends to metric units, and the limit."""
        return 1.0, limit_of(cell.clause)

    def _note(self, cell: Cell, samples: Samples, *, undecided: bool) -> str:
        """The timed requests, and the overhead of recording logprobs (law 10)."""
        n = len(samples.served)
        served, recorded = (
            level(blocks, cell.clause.percentile) for blocks in (samples.served, samples.recorded)
        )
        text = f"{n} blocks of {self.load.concurrency} requests, served without logprobs"
        if served:
            text += f"; recording them changes this by {recorded / served - 1:+.1%}"
        if undecided and n < LOOKS[-1]:
            text += "; the interval crosses the limit, more blocks follow"
        elif undecided:
            text += "; the interval still crosses the limit: time on a quieter machine"
        return text


@dataclass(frozen=True)
class LevelToStable(ServiceLevel):
    """The limit is `times` the stable kernel's value in blocks that alternate with infer's.

    Compared is the ratio of the two aggregates, over resampled pairs of blocks: a slow machine
    slows both.
    """

    times: float = field(default=1.0, kw_only=True)
    peers: ClassVar[tuple[str, ...]] = (STABLE,)

    def _scale(self, cell: Cell, samples: Samples) -> tuple[float, float]:
        stable = level(samples.stable, cell.clause.percentile)
        return stable, self.times * stable


def service_level(clause: Clause, load: LoadOf, seed: int) -> ServiceLevel:
    limit = clause.at_most if clause.at_least is None else clause.at_least
    if isinstance(limit, Relative):
        return LevelToStable(load, seed, times=limit.times)
    return ServiceLevel(load, seed)
