# The data of a case, and the missing data: a clause without data is inconclusive.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from servanda.authoring.contract_test.model import Case, ContractTest, Level
from servanda.judgement.clause_kinds import Later
from servanda.judgement.clauses.base import DRAWS, SELVES, Cell
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
from servanda.judgement.evidence import GoldenRun
from servanda.judgement.plan import Plan
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.calibration import CALIBRATION
from servanda.traces.assignments import Assignment
from servanda.traces.latency import Timing
from servanda.traces.trace import Trace, TracePair

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
