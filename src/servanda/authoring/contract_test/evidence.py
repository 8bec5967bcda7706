# The data of a case as evidence, per evaluation, in synthetic rounds.

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from servanda.authoring.contract_test.model import REST, Case, ContractTest, Expectation, Level
from servanda.authoring.contract_test.series import Chance, Series
from servanda.contract.identity import EvidenceKey
from servanda.contract.model import WHOLE
from servanda.contract.stages import course_of
from servanda.errors import ContractError, Problem
from servanda.judgement.clause_kinds import Later
from servanda.judgement.clauses.base import DRAWS, SELVES, Cell, Source
from servanda.judgement.clauses.guards import Coverage, Windows
from servanda.judgement.clauses.numerical import CornerRun
from servanda.judgement.clauses.sample_ratio import Split
from servanda.judgement.clauses.service_level import (
    LOOKS,
    RECORDED,
    SERVED,
    STABLE,
    TIMINGS,
    LoadOf,
    LoadRun,
)
from servanda.judgement.evidence import Evidence, GoldenRun, Round, weigh, weigh_golden, weigh_once
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule, Unit
from servanda.judgement.slices.columns import columns
from servanda.judgement.slices.rules import Cut, cuts_of
from servanda.registry import did_you_mean, quoted
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.calibration import CALIBRATION
from servanda.theory.stats.agreement import Agreement
from servanda.traces.request_log import Assignment
from servanda.traces.trace import Timing, Trace, TracePair, some

MOST_TOKENS = 20_000_000  # of one case; a minute of weighing

MOST_LOOKS = 1_000  # of one case with a clock

Place = tuple[str | int, ...]


def width_of(test: ContractTest, width: int) -> int:
    """Tokens of each response: given by the test, or the workload's limit."""
    return min(test.answer_tokens or width, width)


def misfits(test: ContractTest, plan: Plan) -> Iterator[Problem]:
    """Parts of a test that its contract lacks, each with its place in the test."""
    yield from _levels(test, plan, (), test.golden, test.timing)
    for i, case in enumerate(test.cases):
        path = ("cases", i)
        for part in ("traffic", "self_noise", "stable"):
            for name in getattr(case, part) or {}:
                yield from _slice(test, plan, (*path, part), name)
        yield from _levels(test, plan, path, case.golden, case.timing)
        for j, expectation in enumerate(case.expect):
            yield from _expectation(test, plan, case, (*path, "expect", j), expectation)


def named_slices(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Slice of the contract -> the names of its parts, in all workloads; the whole is one."""
    parts_of: dict[str, dict[str, None]] = {WHOLE: {WHOLE: None}}
    for corpus in plan.corpora.values():
        for rule, cuts in cuts_of(plan.contract.slices, corpus).items():
            parts_of.setdefault(rule, {}).update({cut.name: None for cut in cuts})
    return {rule: tuple(names) for rule, names in parts_of.items()}


def _slice(test: ContractTest, plan: Plan, path: Place, name: str) -> Iterator[Problem]:
    slices = named_slices(plan)
    known = [part for parts in slices.values() for part in parts]
    if name == REST or name in known:
        return
    where = test.where(*path, name)
    if name in slices:
        message = f"slice {name!r} is split, and a series is for one of its parts"
        yield Problem(message, where, f"known: {', '.join(slices[name])}")
    else:
        hint = did_you_mean(name, [*known, REST])
        yield Problem(f"no slice is named {quoted(name)}", where, hint)


def _levels(
    test: ContractTest, plan: Plan, path: Place, golden: object, timing: object
) -> Iterator[Problem]:
    metrics = {c.clause.metric for c in plan.cells if c.section == "numerical"}
    levels = {c.clause.id for c in plan.cells if c.clause.metric in TIMINGS}
    for part, names, known, what in (
        ("golden", golden, metrics, "numerical clause concerns"),
        ("timing", timing, levels, "clause about time or speed is named"),
    ):
        for name in names if isinstance(names, dict) else ():
            if name not in known:
                hint = did_you_mean(name, known) if known else f"remove {part}"
                yield Problem(f"no {what} {quoted(name)}", test.where(*path, part, name), hint)


def _expectation(
    test: ContractTest, plan: Plan, case: Case, path: Place, expectation: Expectation
) -> Iterator[Problem]:
    clauses = {cell.clause.id for cell in plan.cells}
    cells = {f"{cell.clause.id} on {cell.cut.name}" for cell in plan.cells}
    for name in expectation.cells:
        if name not in clauses and name not in cells:
            own = [cell for cell in cells if cell.startswith(f"{name.partition(' on ')[0]} on ")]
            hint = did_you_mean(name, own or [*clauses, *cells])
            message = f"no cell is named {quoted(name)}"
            yield Problem(message, test.where(*path, "cells", name), hint)
    legs = [leg.name for leg in course_of(plan.contract)]
    # a promotion in full has one window after another
    pattern = "|".join([*map(re.escape, legs), *(["full-[1-9][0-9]*"] if "full-1" in legs else [])])
    if expectation.leg is not None and not re.fullmatch(pattern, expectation.leg):
        hint = f"known: {', '.join(legs)}"
        message = f"the promotion has no leg {quoted(expectation.leg)}"
        yield Problem(message, test.where(*path, "leg"), hint)
    yield from _sizes(test, plan, case, path, expectation)


def _sizes(
    test: ContractTest, plan: Plan, case: Case, path: Place, expectation: Expectation
) -> Iterator[Problem]:
    """Whether the data suffices for the evaluation, and whether it takes at most a minute."""
    if case.clock is not None:
        looks = case.clock.looks(expectation.at or 0.0)
        groups = looks * case.clock.groups
        ends, where = math.inf, test.where(*path, "at")
        if looks > MOST_LOOKS:
            message = f"{looks:,} looks until then; a case has at most {MOST_LOOKS:,}"
            yield Problem(message, where, "let the clock tick less often: every: 10m")
    else:
        groups = expectation.after
        if groups is None:
            groups = min(map(len, (case.traffic or {}).values()), default=0)
        ends = min((s.rounds * s.workload.round for s in plan.schedules), default=0)
        where = test.where(*path, "after")
    tokens = sum(groups * s.workload.samples * width_of(test, s.width) for s in plan.schedules)
    if groups > ends:
        message = f"a run of this contract ends after {ends:,} prompt groups"
        hint = "look earlier, or raise the second number of promotion.offline.prompt_groups"
        yield Problem(message, where, hint)
    elif tokens > MOST_TOKENS:
        message = f"{groups:,} prompt groups are {tokens:,} tokens"
        hint = f"a case has at most {MOST_TOKENS:,}: write answer_tokens: 32 beside seed:"
        yield Problem(message, where, hint)


# The data of a case, and the missing data: a clause without data is inconclusive.


_POSITIONS = 32  # of each golden text
_REQUESTS = 8  # of each timed block
_SERVED = 1_000_000  # requests, of which a share was scored again
_USERS = 10_000  # of a step
_TOKENS = 16  # of each timed request


class NotGivenPromise(Later):
    """A cell without data and with a share of alpha, which keeps the thresholds of the others."""

    counts: ClassVar[bool] = True


@dataclass(frozen=True)
class Given:
    """The data of a case besides its series; defaults are those of the test."""

    golden: Mapping[str, float]
    timing: Mapping[str, float | Level]
    rescored: float | None
    sample_ratio: float | None
    peers: frozenset[str]

    @classmethod
    def of(cls, test: ContractTest, case: Case) -> Given:
        peers = {*SELVES} if case.self_noise else set()
        return cls(
            (test.golden if case.golden is None else case.golden) or {},
            (test.timing if case.timing is None else case.timing) or {},
            case.rescored,
            case.sample_ratio,
            frozenset(peers | ({"stable"} if case.stable else set())),
        )

    def lacks(self, cell: Cell) -> str:
        """The data that a cell needs and the case lacks; "" if nothing is missing."""
        kind, clause = cell.kind, cell.clause
        if kind.source in ("golden", "corners"):
            if clause.metric == CALIBRATION:
                return f"a number for each golden text is no {CALIBRATION}; record a run"
            return "" if clause.metric in self.golden else f"write golden: {{{clause.metric}: ...}}"
        if kind.source == "timing":
            level = self.timing.get(clause.id)
            if "stable" in kind.peers and not isinstance(level, Level):
                return f"write timing: {{{clause.id}: {{infer: ..., stable: ...}}}}"
            return "" if level is not None else f"write timing: {{{clause.id}: ...}}"
        if kind.source == "coverage":
            return "" if self.rescored is not None else "write rescored: 0.02"
        if kind.source == "split":
            if cell.cut.terms:
                return "one share of the users says nothing of a slice"
            return "" if self.sample_ratio is not None else "write sample_ratio: 1.0"
        if kind.source == "batches":
            return "it is measured on engines alone"
        return self._lacks_of_tokens(cell) if kind.source == "workload" else ""

    def _lacks_of_tokens(self, cell: Cell) -> str:
        metric = DIVERGENCES.get(cell.clause.metric)
        if DRAWS in cell.kind.peers:
            return "a log ratio says nothing of rewards; record a run"
        if metric is not None and metric.sampled_form == "top1":
            return "a log ratio does not say which token is the likeliest; record a run"
        if metric is not None and metric.of_experts:
            return "a log ratio does not say which experts computed a token; record a run"
        for name, key in (("stable", "stable"), (SELVES[0], "self_noise")):
            if name in cell.kind.peers and name not in self.peers:
                return f'write {key}: "gap(0.001)x6000"'
        return ""


def without(plan: Plan, lacks: Sequence[str]) -> Plan:
    """The plan in which cells without data are inconclusive; otherwise unchanged.

    Args:
        lacks: per cell, its missing data; "" if nothing is missing.
    """
    cells = []
    for cell, reason in zip(plan.cells, lacks, strict=True):
        kind = (NotGivenPromise if cell.kind.counts else Later)(f"not given: {reason}")
        cells.append(replace(cell, kind=kind) if reason else cell)
    return replace(plan, cells=tuple(cells))


def golden_run(plan: Plan, golden: Mapping[str, float]) -> GoldenRun | None:
    """Golden texts at each of whose positions a metric has the given value; None without one."""
    if plan.golden is None or not any(c.kind.source == "golden" for c in plan.cells):
        return None
    rows = tuple(range(len(plan.golden)))
    n = len(rows) * _POSITIONS
    trace = Trace(
        sequence_S=np.arange(len(rows)),
        length_S=np.full(len(rows), _POSITIONS),
        lost_S=np.zeros(len(rows), dtype=bool),
        prompt_tokens_S=np.zeros(len(rows), dtype=np.int64),
        token_N=np.zeros(n, dtype=np.int64),
        columns={"logp": np.full(n, -1.0)},
    )
    exact = {"tail": np.zeros(n)}
    for name, value in golden.items():
        exact |= {column: np.full(n, value) for column in (name, f"{name}.low", f"{name}.high")}
    return GoldenRun(rows, TracePair(trace, trace), exact)


def corner_runs(plan: Plan, golden: Mapping[str, float]) -> dict[str, CornerRun]:
    """The corners of the envelope, where metrics have the values of the golden texts."""
    exact = {name: np.full(_POSITIONS, value) for name, value in golden.items()}
    return {corner.name: CornerRun(exact, ()) for corner in plan.corners}


def timing_of(plan: Plan, timing: Mapping[str, float | Level]) -> dict[LoadOf, LoadRun]:
    """Blocks of requests under each load, all of which show the given service levels."""
    runs: dict[LoadOf, LoadRun] = {}
    for load, beside in plan.loads.items():
        sides = {side: {} for side in (SERVED, RECORDED, *([STABLE] if beside else []))}
        for cell in plan.cells:
            level = timing.get(cell.clause.id)
            if level is None or cell.kind.load != load:
                continue
            pair = level if isinstance(level, Level) else Level(infer=level, stable=level)
            for side, values in sides.items():
                values[cell.clause.metric] = pair.stable if side == STABLE else pair.infer
        block = {side: _block(values) for side, values in sides.items()}
        runs[load] = LoadRun(blocks=(block,) * LOOKS[-1])
    return runs


def coverage_of(plan: Plan, rescored: float | None) -> Windows:
    """The share of served requests that was scored again, in every window that a clause names."""
    windows = {cell.clause.over for cell in plan.cells if cell.kind.source == "coverage"}
    scored = round((rescored or 0.0) * _SERVED)
    return {window: Coverage(scored, _SERVED) for window in windows}


def split_of(plan: Plan, sample_ratio: float | None) -> Split:
    """Users of a step, evenly spread over time; infer serves `sample_ratio` of its share."""
    planned = plan.leg.share if plan.leg else 0.0
    if sample_ratio is None or not planned:
        return Split(planned)
    hits = np.diff(np.floor(min(1.0, sample_ratio * planned) * np.arange(_USERS + 1) + 0.5)) > 0
    users = (
        Assignment("", "", 0.0, str(i), "infer" if hit else "stable") for i, hit in enumerate(hits)
    )
    return Split(planned, tuple(users))


def _block(values: Mapping[str, float]) -> Timing:
    first, gap, speed = (values.get(name, 1.0) for name in TIMINGS)
    tokens = _REQUESTS * _TOKENS
    return Timing((first,) * _REQUESTS, (gap,) * (tokens - _REQUESTS), tokens / speed)


# Synthetic rounds: the tokens of a series, in the form of two kernels' records.
#
# The schedule is the plan's own, so prompts, labels and groups are real.  A token's context is
# a geometric distribution whose ratio differs from token to token, so that ranks, masses and
# entropies are exact; train's logprob is infer's plus the log ratio of the series.
# Axes: S sequences in dispatch order, N tokens of all sequences.


Array = NDArray[Any]

_GRID = 2.0**40  # of logprobs: sums and differences of such numbers are exact
_RATIOS = (0.02, 0.98)  # of the geometric contexts: from .1 to 4.9 nats of entropy
_PROMPT = 32  # tokens of a prompt, if no slice uses its length
_CLASSES = 5  # of tokens: all but the end, which no answer of a rehearsal has


@dataclass(frozen=True)
class Steered:
    """Series with their slices; a token follows the first slice that contains it."""

    parts: tuple[tuple[str, Cut | None, Series], ...]  # None: the rest

    @classmethod
    def of(
        cls, plan: Plan, schedule: Schedule, traffic: Mapping[str, Series] | None
    ) -> Steered | None:
        if not traffic:
            return None
        cuts = cuts_of(plan.contract.slices, schedule.corpus)
        by_name = {cut.name: cut for parts in cuts.values() for cut in parts}
        return cls(
            tuple(
                (name, None if name == REST else by_name[name], series)
                for name, series in traffic.items()
                if name == REST or name in by_name  # a slice of another workload
            )
        )

    @property
    def fields(self) -> set[str]:
        return {field for _, cut, _ in self.parts if cut for field in cut.fields}


@dataclass(frozen=True)
class Traffic:
    """The rounds of one workload of a rehearsed case.

    Args:
        seed: seed of all samples; width: tokens of each response; temperature: of the sampling.
        first: prompt groups of the series before the first of these rounds.
        own, noise, stable: the series of the two kernels, of the noise of each, and of the stable
            kernel; None if missing in the case.
    """

    plan: Plan
    schedule: Schedule
    seed: str
    width: int
    own: Steered | None
    noise: Steered | None = None
    stable: Steered | None = None
    temperature: float = 1.0
    first: int = 0

    def round(self, index: int) -> tuple[Round, frozenset[str]]:
        """One complete round, and the names of the series that its tokens follow.

        The same at every evaluation, and in every case with the same series.

        Raises:
            ContractError: tokens without a series.
        """
        assert self.own is not None  # without traffic there is no evaluation beyond 0 groups
        units = self.schedule.units(index)
        infer = self._drawn(units, f"infer {index}")
        peers = {}
        pair, followed = self._pair(infer, units, self.own, f"own {index}")
        if self.noise is not None:
            rows = self.schedule.noise_rows(len(units))
            again = [units[row] for row in rows]
            for name, side in zip(SELVES, (pair.train, pair.infer), strict=True):
                part = some(side, [u.sequence for u in again])
                part = replace(
                    part, columns={**some(infer, part.sequence_S.tolist()).columns, **part.columns}
                )
                peers[name], _ = self._pair(part, tuple(again), self.noise, f"{name} {index}")
        if self.stable is not None:
            drawn = self._drawn(units, f"stable {index}")
            peers["stable"], _ = self._pair(drawn, units, self.stable, f"from stable {index}")
        return Round(self.schedule.name, index, units, pair, peers), followed

    @cached_property
    def _prompt_tokens(self) -> Array:
        """Tokens of each prompt, [rows]: as given, or on either side of every edge of a slice.

        Text prompts have no token count without a tokenizer.
        """
        corpus = self.schedule.corpus
        edges = {
            int(term.value)
            for cell in self.plan.cells
            for term in cell.cut.terms
            if term.field == "request.prompt_tokens" and term.op != "exists"
        }
        choices = sorted({n for edge in edges for n in (edge - 1, edge, edge + 1) if n > 0})
        uniform = _generator(self.seed, self.schedule.name, "prompts").random(len(corpus))
        chosen = np.array(choices or [_PROMPT])[(uniform * len(choices or [1])).astype(np.int64)]
        given = [p.token_ids for p in corpus.prompts]
        return np.array([len(ids) if ids else n for ids, n in zip(given, chosen, strict=True)])

    def _drawn(self, units: tuple[Unit, ...], stream: str) -> Trace:
        """Responses of full width, with a kernel's record of its own samples."""
        n = len(units) * self.width
        random = _generator(self.seed, self.schedule.name, f"draw {stream}")
        low, high = _RATIOS
        ratio_N = low + (high - low) * random.random(n)
        drawn_N = ratio_N ** (1 / self.temperature)
        rank_N = np.floor(np.log1p(-random.random(n)) / np.log(drawn_N))
        p_max_N = 1 - ratio_N
        logp_N = np.round((np.log(p_max_N) + rank_N * np.log(ratio_N)) * _GRID) / _GRID
        position_N = np.tile(np.arange(self.width, dtype=np.float64), len(units))
        prompt_S = self._prompt_tokens[[u.row for u in units]]
        class_N = rank_N % _CLASSES
        previous_N = np.where(position_N == 0, np.nan, np.concatenate([[np.nan], class_N])[:-1])
        return Trace(
            sequence_S=np.array([u.sequence for u in units], dtype=np.int64),
            length_S=np.full(len(units), self.width, dtype=np.int64),
            lost_S=np.zeros(len(units), dtype=bool),
            prompt_tokens_S=prompt_S,
            token_N=rank_N.astype(np.int64),
            columns={
                "logp": logp_N,
                "rank": rank_N,
                "mass_before": -np.expm1(rank_N * np.log(ratio_N)),
                "top1": np.zeros(n),
                "p_max": p_max_N,
                "entropy_nats": -np.log(p_max_N) - ratio_N / p_max_N * np.log(ratio_N),
                "token_class": class_N,
                "previous_class": previous_N,
                "length": np.repeat(prompt_S, self.width) + position_N,
                "turn": np.ones(n),
                "turn_position": position_N,
                "staleness": np.zeros(n),
            },
            about={"capture": "float64"},
        )

    def _pair(
        self, infer: Trace, units: tuple[Unit, ...], steered: Steered, stream: str
    ) -> tuple[TracePair, frozenset[str]]:
        """The sampled tokens with train's logprobs: infer's plus the log ratio of the series."""
        n = len(infer.token_N)
        random = _generator(self.seed, self.schedule.name, f"ratio {stream}")
        # Box-Muller, independent of the NumPy version
        radius_N = np.sqrt(-2 * np.log1p(-random.random(n)))
        normal_N = radius_N * np.cos(2 * np.pi * random.random(n))
        chance = Chance(normal_N, random.random(n))
        group_N = self.first + np.repeat([u.group for u in units], infer.length_S)
        prompts = [self.schedule.corpus.prompts[u.row] for u in units]
        cut_columns = columns(TracePair(infer, infer), prompts, steered.fields)
        ratio_N, left_N, followed = np.full(n, np.nan), np.ones(n, dtype=bool), set()
        for name, cut, series in steered.parts:
            mine_N = left_N & (cut.mask(cut_columns, n) if cut else True)
            at = np.flatnonzero(mine_N)
            ratio_N[at] = series.values(group_N[at], chance.at(at))
            left_N &= ~mine_N
            followed |= {name} if len(at) else set()
        if left_N.any():
            names = ", ".join(name for name, _, _ in steered.parts)
            raise ContractError(
                f"tokens outside {names} follow no series",
                hint=f'add {REST}: "gap(0.01)x400", or a series of each other slice',
            )
        lost_N = np.isnan(ratio_N)
        own = {name: infer.columns[name] for name in ("logp", "mass_before")}
        drawn = {name: np.where(lost_N, np.nan, own[name]) for name in own}
        logp_N = drawn["logp"] + ratio_N
        # train's masses of the other tokens are proportional to infer's
        others_N = -np.expm1(np.minimum(logp_N, 0.0)) / -np.expm1(drawn["logp"])
        scored = {"logp": logp_N, "mass_before": drawn["mass_before"] * others_N}
        pair = TracePair(
            replace(infer, columns={**infer.columns, **drawn}), replace(infer, columns=scored)
        )
        return pair, frozenset(followed)


def first_groups(whole: Round, groups: int) -> Round:
    """The first prompt groups of a round, for an evaluation before it is closed."""
    drawn = list(dict.fromkeys(unit.group for unit in whole.units))[:groups]
    units = tuple(unit for unit in whole.units if unit.group in {*drawn})
    return replace(
        whole,
        units=units,
        pair=_part(whole.pair, units),
        peers={name: _part(pair, units) for name, pair in whole.peers.items()},
    )


def _part(pair: TracePair, units: tuple[Unit, ...]) -> TracePair:
    sequences = {unit.sequence for unit in units}
    rows = [s for s in pair.infer.sequence_S.tolist() if s in sequences]
    return TracePair(some(pair.infer, rows), some(pair.train, rows))


def _generator(seed: str, workload: str, stream: str) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed}|{workload}|{stream}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))


_MADE = "rehearsed"  # instead of a kernel's digest: no kernel ran


@dataclass(frozen=True)
class Data:
    """The data of a case.

    Args:
        plan: plan in which clauses without data are inconclusive.
        once: evidence available from the first evaluation on.
        round: (workload, index) -> round; its first prompt groups if it is cut.
        groups: prompt groups of the last evaluation, as default of expectations.
        lacks: the missing data of each cell; "" if nothing is missing.
        done: called after the last evaluation.
    """

    plan: Plan
    once: Evidence
    round: Callable[[Schedule, int], Round]
    groups: int
    lacks: Sequence[str]
    done: Callable[[int], None] = lambda _: None

    @property
    def not_given(self) -> tuple[str, ...]:
        """Clauses without data, each with the missing data."""
        pairs = zip(self.plan.cells, self.lacks, strict=True)
        return tuple(dict.fromkeys(f"{cell.clause.id}: {why}" for cell, why in pairs if why))


class GrowingEvidence:
    """The growing evidence of a case, per evaluation."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self._closed = data.once

    def after(self, groups: int) -> Evidence:
        """The evidence of a number of prompt groups of every workload, non-decreasing.

        As in a run, rounds are complete; only the last one is cut at an evaluation inside it.
        """
        cut = Evidence(self._closed.key, self._closed.plan)
        for schedule in self.data.plan.schedules:
            whole, rest = divmod(groups, schedule.workload.round)
            for index in range(len(self._closed.closed(schedule.name)), whole):
                self._closed += self._weighed(self.data.round(schedule, index))
            if rest:
                cut += self._weighed(first_groups(self.data.round(schedule, whole), rest))
        return _as_written(self._closed + cut)

    def _weighed(self, measured: Round) -> Evidence:
        return weigh(self.data.plan, self._closed.key, [measured])


def _as_written(evidence: Evidence) -> Evidence:
    """Of series that someone wrote: sides that are equal in every bit are meant to be."""
    rounds, once = (
        {name: replace(part, agreement=Agreement()) for name, part in parts.items()}
        for parts in (evidence.rounds, evidence.once)
    )
    return replace(evidence, rounds=rounds, once=once)


def synthetic_data(test: ContractTest, i: int, plan: Plan, leg: str = "", first: int = 0) -> Data:
    """The data of a case with series.

    Args:
        leg: step of a promotion, with separate samples; first: prompt groups of the series before
            it.

    Raises:
        ContractError: on evaluation: tokens follow no series, or a series has no token.
    """
    case = test.cases[i]
    given = Given.of(test, case)
    lacks = [given.lacks(cell) for cell in plan.cells]
    plan = without(plan, lacks)
    key = EvidenceKey(plan.contract.digest, plan.texts, _MADE, _MADE, _MADE)
    measured: dict[Source, object] = {
        "coverage": coverage_of(plan, given.rescored),
        "split": split_of(plan, given.sample_ratio),
        "corners": corner_runs(plan, given.golden),
    }
    if plan.loads:
        measured["timing"] = timing_of(plan, given.timing)
    once = weigh_once(plan, key, measured)
    golden = golden_run(plan, given.golden)
    once += weigh_golden(plan, key, golden) if golden else Evidence(key, plan.digest)
    traffic = {
        schedule.name: Traffic(
            plan,
            schedule,
            f"{test.seed}|{leg}" if leg else f"{test.seed}",
            width_of(test, schedule.width),
            Steered.of(plan, schedule, case.traffic),
            Steered.of(plan, schedule, case.self_noise),
            Steered.of(plan, schedule, case.stable),
            case.temperature or 1.0,
            first,
        )
        for schedule in plan.schedules
    }
    followed: set[str] = set()

    def make_round(schedule: Schedule, index: int) -> Round:
        try:
            measured, names = traffic[schedule.name].round(index)
        except ContractError as error:
            where = test.where("cases", i, "traffic")
            raise ContractError.all([replace(p, where=where) for p in error.problems]) from None
        followed.update(names)
        return measured

    def refuse_unfollowed(groups: int) -> None:
        missed = [name for name in case.traffic or {} if name not in followed and name != REST]
        if groups and missed:
            raise ContractError.all(
                [
                    Problem(
                        f"no token of this case follows the series of {name!r}",
                        test.where("cases", i, "traffic", name),
                        "the first series whose slice a token is in has it: put this one before "
                        "the others; or no prompt of the first groups is of the slice",
                    )
                    for name in missed
                ]
            )

    lengths = [len(series) for series in (case.traffic or {}).values()]
    # a step may end before each of its slices was met
    done = {} if leg else {"done": refuse_unfollowed}
    return Data(plan, once, make_round, min(lengths, default=0), lacks, **done)
