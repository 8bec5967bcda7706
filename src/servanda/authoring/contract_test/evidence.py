# The data of a case as evidence, per evaluation: synthetic rounds, or those of a recorded run.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from servanda.authoring.contract_test.missing_data import (
    Given,
    corner_runs,
    coverage_of,
    golden_run,
    split_of,
    timing_of,
    without,
)
from servanda.authoring.contract_test.model import REST, ContractTest
from servanda.authoring.contract_test.synthetic import Steered, Traffic, first_groups
from servanda.authoring.contract_test.validate import width_of
from servanda.contract.identity import EvidenceKey
from servanda.errors import ContractError, EvidenceError, Problem
from servanda.judgement.clauses.base import Cell, Source
from servanda.judgement.evidence import Evidence, GoldenRun, Round, weigh, weigh_golden, weigh_once
from servanda.judgement.plan import Plan, make_plan
from servanda.judgement.schedule import Schedule
from servanda.theory.divergence.base import DIVERGENCES, OF_EXPERTS
from servanda.theory.stats.agreement import Agreement

_MADE = "rehearsed"  # instead of a kernel's digest: no kernel ran


@dataclass(frozen=True)
class Recording:
    """The measurements of a run, to be judged by another contract on the same prompts and samples.

    Args:
        key: its evidence key; golden, rounds: the measurements, rounds in order.
    """

    key: EvidenceKey
    golden: GoldenRun | None
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Data:
    """The data of a case.

    Args:
        plan: plan in which clauses without data are inconclusive.
        once: evidence available from the first evaluation on.
        round: (workload, index) -> round; its first prompt groups if it is cut.
        groups: prompt groups of the last evaluation, as default of expectations.
        not_given: clauses without data, each with the missing data.
        done: called after the last evaluation.
    """

    plan: Plan
    once: Evidence
    round: Callable[[Schedule, int], Round]
    groups: int
    not_given: tuple[str, ...] = ()
    done: Callable[[int], None] = lambda _: None


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
        evidence = self._closed + cut
        return _as_written(evidence) if evidence.key.train == _MADE else evidence

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
    return Data(plan, once, make_round, min(lengths, default=0), _not_given(plan, lacks), **done)


def recorded_data(test: ContractTest, i: int, plan: Plan, run: Recording) -> Data:
    """The data of a case with a recorded run.

    Raises:
        EvidenceError: the run has other prompts or samples.
        ContractError: on evaluation: the run has fewer prompt groups.
    """
    case = test.cases[i]
    plan = make_plan(plan.contract, plan.corpora, plan.golden, attempt=run.key.attempt)
    if plan.texts != run.key.corpus:
        raise EvidenceError(
            f"{case.recorded} was measured on other prompts or golden texts than this contract "
            "names",
            hint="judge it by a contract of the same files, or measure again",
        )
    lacks = [_lacks(cell, run) for cell in plan.cells]
    plan = without(plan, lacks)
    schedules = {schedule.name: schedule for schedule in plan.schedules}
    for measured in run.rounds:
        schedule = schedules.get(measured.workload)
        if schedule is None or schedule.units(measured.index) != measured.units:
            raise EvidenceError(
                f"{case.recorded} drew other prompts than this contract would: its workloads, "
                "round, samples or seed differ",
                hint="a recorded run is judged by contracts that launch the same sequences",
            )
    recorded = {(measured.workload, measured.index): measured for measured in run.rounds}
    once = Evidence(run.key, plan.digest)
    if run.golden is not None and plan.golden is not None:
        once += weigh_golden(plan, run.key, run.golden)
    counts = {
        name: sum(len({u.group for u in r.units}) for r in run.rounds if r.workload == name)
        for name in schedules
    }
    groups = min(counts.values(), default=0)

    def read_round(schedule: Schedule, index: int) -> Round:
        measured = recorded.get((schedule.name, index))
        if measured is None:
            raise ContractError(
                f"{case.recorded} has {groups:,} prompt groups",
                where=test.where("cases", i, "recorded"),
                hint="look earlier, or leave after out: all of it",
            )
        return measured

    return Data(plan, once, read_round, groups, _not_given(plan, lacks))


def _lacks(cell: Cell, run: Recording) -> str:
    """The data of a cell that a recorded run lacks; "" if nothing is missing."""
    kind, metric = cell.kind, cell.clause.metric
    if kind.source in ("timing", "batches", "corners"):
        return "rounds and golden texts are what is read of a recorded run"
    if kind.source == "golden":
        exact = run.golden.exact if run.golden is not None else {}
        named = (metric, f"{metric}.low", "conf_train")
        return "" if any(name in exact for name in named) else "the run has no golden texts of it"
    first = next((measured for measured in run.rounds if measured.workload == cell.workload), None)
    if kind.source != "workload" or first is None:
        return ""
    missing = [name for name in kind.peers if name not in first.peers]
    divergence = DIVERGENCES.get(metric)
    form = divergence.sampled_form if divergence is not None else None
    if form == "top1" or form in OF_EXPERTS:
        sides = {"train": first.pair.train, "infer": first.pair.infer}
        missing += [f"{form} of {side}" for side, t in sides.items() if t.values(form) is None]
    return f"the run did not record {', '.join(missing)}" if missing else ""


def _not_given(plan: Plan, lacks: Sequence[str]) -> tuple[str, ...]:
    clauses = [f"{c.clause.id}: {why}" for c, why in zip(plan.cells, lacks, strict=True) if why]
    return tuple(dict.fromkeys(clauses))
