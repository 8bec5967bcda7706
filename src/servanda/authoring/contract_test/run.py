# Runs contract tests: judges the cases of a test by the same steps as a run.
#
# No kernel is run: tokens are generated from the series, and judged like measured ones.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from servanda.authoring.contract_test.evidence import (
    Data,
    GrowingEvidence,
    Recording,
    recorded_data,
    synthetic_data,
)
from servanda.authoring.contract_test.model import Act, Clock, ContractTest, Expectation
from servanda.authoring.contract_test.results import CaseResult, Check, Evaluation, SuiteResult
from servanda.authoring.contract_test.validate import misfits
from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of
from servanda.errors import ContractError, EvidenceError, Problem, Where
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.escalation import asked_for
from servanda.judgement.plan import Plan, make_plan
from servanda.judgement.schedule import Arrivals, Schedule
from servanda.judgement.verdict import Verdict, judge
from servanda.promotion.advance import Move, advance, begin
from servanda.promotion.api import leg_finding
from servanda.promotion.effects import route_of
from servanda.promotion.operator import approve, override, roll_back
from servanda.promotion.state import LegFinding, Override, State, leg_of
from servanda.registry import quoted
from servanda.report.cell_text import worst_first
from servanda.traces.corpus import Corpus

# A promotion in virtual time: evaluations at fixed intervals, with the series of a case as data.
#
# The steps are those of a real one (`begin`, `advance`, and actions of people); only the clock and
# the tokens are synthetic.  The series continue with time: data of one step is not repeated on the
# next.


_SIMULATED = "rehearsed"  # the run's name, and the reason of every act


@dataclass(frozen=True)
class LegPlan(Plan):
    """The plan of one step, with the contract's own prompts as user requests."""

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """As planned; those of a live step have a separate order."""
        return tuple(
            replace(s.planned, seed=s.seed) if isinstance(s, Arrivals) else s
            for s in super().schedules
        )


@dataclass(frozen=True)
class Moment:
    """The state of a promotion after one evaluation.

    Args:
        at: virtual seconds; leg: evaluated step; share: share of the traffic that infer serves.
        verdict: of the evaluation, and its prompt groups; paged: people paged until then.
    """

    at: float
    state: State
    leg: Leg
    share: float
    verdict: Verdict
    paged: tuple[str, ...]


def simulate(test: ContractTest, i: int, plan: Plan) -> tuple[list[Moment], tuple[str, ...]]:
    """Every evaluation of a case with a clock, in order, and the missing data of any step.

    Raises:
        ContractError: an act that the promotion refuses, at its place in the test.
    """
    case = test.cases[i]
    assert case.clock is not None
    run = _Run(test, i, plan, case.clock)
    looks = case.clock.looks(max(e.at or 0.0 for e in case.expect))
    moments = [run.evaluate(tick) for tick in range(looks + 1)]
    return moments, tuple(run.not_given)


class _Run:
    def __init__(self, test: ContractTest, i: int, plan: Plan, clock: Clock) -> None:
        self.test, self.i, self.plan, self.clock = test, i, plan, clock
        self.course = course_of(plan.contract)
        self.not_given: dict[str, None] = {}
        self._paged: list[str] = []
        self._done = 0  # acts
        self._changed: dict[str, str] = {}
        self._fails = ""
        leg = self.course[0]
        self._enter(leg, 0)
        key = self._gathering.data.once.key
        self._follow(begin(_SIMULATED, key, self.course, now=0.0))

    def evaluate(self, tick: int) -> Moment:
        """Due actions, one evaluation, and its consequences."""
        now, self._fails = tick * self.clock.every, ""
        acts = sorted(enumerate(self.test.cases[self.i].acts), key=lambda act: act[1].at)
        while self._done < len(acts) and acts[self._done][1].at <= now:
            self._act(*acts[self._done], now)
            self._done += 1
        leg = leg_of(self.course, self._state)
        if leg.name != self._leg.name:
            self._enter(leg, (tick - 1) * self.clock.groups)
        if not self._state.ended:
            groups = tick * self.clock.groups - self._first
            self._verdict = judge(self._gathering.data.plan, self._gathering.after(groups))
            finding = leg_finding(self.plan.contract, leg, self._verdict)
            finding = replace(finding, key=replace(self._verdict.key, **self._changed))
            if self._fails:
                finding = LegFinding(leg.name, finding.key, error=self._fails)
            self._follow(advance(self.course, self._state, finding, now=now))
        share = route_of(self.course, self._state)["share"]
        return Moment(now, self._state, leg, share, self._verdict, tuple(self._paged))

    def _enter(self, leg: Leg, first: int) -> None:
        """Begin a step without evidence."""
        plan = self.plan
        plan = make_plan(plan.contract, plan.corpora, plan.golden, leg=leg)
        plan = LegPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)})
        data = synthetic_data(self.test, self.i, plan, leg.name, first)
        self.not_given.update(dict.fromkeys(data.not_given))
        self._leg, self._first, self._gathering = leg, first, GrowingEvidence(data)

    def _follow(self, move: Move) -> None:
        self._state, effects = move
        self._paged += [str(e.body["to"]) for e in effects if e.kind == "page"]

    def _act(self, j: int, act: Act, now: float) -> None:
        if act.changes is not None:
            self._changed[act.changes] = "another"
        self._fails = act.fails or self._fails
        try:
            for actor, action in ((act.approve, approve), (act.roll_back, roll_back)):
                if actor is not None:
                    signature = {"actor": actor, "reason": _SIMULATED, "now": now}
                    self._follow(action(self.course, self._state, **signature))
            if act.override is not None:
                clause, _, part = act.override.partition(" on ")
                given = Override(clause, part or "*", _SIMULATED, _SIMULATED, now + act.ttl)
                self._follow(override(self.course, self._state, given, now=now))
        except EvidenceError as error:
            where = self.test.where("cases", self.i, "acts", j)
            raise ContractError.all([replace(p, where=where) for p in error.problems]) from None


Locate = Callable[..., Where | None]  # a part of an expectation -> its place in the test


def run_test(
    test: ContractTest,
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    recorded: Mapping[str, Recording] | None = None,
) -> SuiteResult:
    """A contract's results for the cases of a test; pure, and determined by the seed.

    Args:
        corpora, golden: the texts that the contract names.
        recorded: runs, under the names that cases give them.

    Raises:
        ContractError: the contract cannot be planned; or the test refers to parts that the
            contract, the run or its case lacks.
        EvidenceError: a recorded run has other prompts or samples than this contract.
    """
    plan = make_plan(contract, corpora, golden)
    problems = [*misfits(test, plan)]
    if problems:
        raise ContractError.all(problems)
    cases = []
    for i, case in enumerate(test.cases):
        if case.clock is not None:
            cases.append(_run_promotion(test, i, plan))
            continue
        if case.recorded is None:
            data = synthetic_data(test, i, plan)
        else:
            data = recorded_data(test, i, plan, (recorded or {})[case.recorded])
        cases.append(_run_case(test, i, data))
    return SuiteResult(test.metadata.name, contract.metadata.name, contract.digest, tuple(cases))


def _run_case(test: ContractTest, i: int, data: Data) -> CaseResult:
    """One case: an evaluation at each number of prompt groups, with its expectations."""
    case = test.cases[i]
    problems = [*_vacuous(test, i, data)]
    if problems:
        raise ContractError.all(problems)
    groups = [data.groups if e.after is None else e.after for e in case.expect]
    gathering = GrowingEvidence(data)
    verdicts = {n: judge(data.plan, gathering.after(n)) for n in sorted({*groups})}
    data.done(max(groups))
    expectations = []
    for j, (expectation, n) in enumerate(zip(case.expect, groups, strict=True)):
        where = partial(test.where, "cases", i, "expect", j)
        checks = tuple(_checks(where, expectation, data.plan.contract, verdicts[n]))
        expectations.append(Evaluation(n, checks, verdicts[n], where()))
    return CaseResult(case.name, tuple(expectations), data.not_given, test.where("cases", i))


def _vacuous(test: ContractTest, i: int, data: Data) -> Iterator[Problem]:
    """Cells of an expectation whose result does not depend on the case's data."""
    for j, expectation in enumerate(test.cases[i].expect):
        for name in expectation.cells:
            pairs = zip(data.plan.cells, data.lacks, strict=True)
            missing = [why for c, why in pairs if _is_named(name, c.clause.id, c.cut.name)]
            if missing and all(missing):
                message = f"the case has no data of {quoted(name)}: it is inconclusive at any limit"
                where = test.where("cases", i, "expect", j, "cells", name)
                yield Problem(message, where, missing[0])


def _is_named(name: str, clause: str, part: str) -> bool:
    """Whether a name in `cells` means a cell; a clause alone means all of its cells."""
    return name in (clause, f"{clause} on {part}")


def _run_promotion(test: ContractTest, i: int, plan: Plan) -> CaseResult:
    """One case with a clock: each expectation held against the latest evaluation of its time."""
    case = test.cases[i]
    assert case.clock is not None
    moments, not_given = simulate(test, i, plan)
    expectations = []
    for j, expectation in enumerate(case.expect):
        where = partial(test.where, "cases", i, "expect", j)
        moment = moments[case.clock.looks(expectation.at or 0.0)]
        leg = leg_of(course_of(plan.contract), moment.state)
        checks = (
            *_of_moment(where, expectation, moment, leg),
            *_checks(where, expectation, plan.contract, moment.verdict),
        )
        stands = f"{leg.name}, {moment.state.status.replace('_', ' ')}: {moment.state.why}"
        verdict = moment.verdict
        expectations.append(Evaluation(verdict.groups, checks, verdict, where(), moment.at, stands))
    return CaseResult(case.name, tuple(expectations), not_given, test.where("cases", i))


def _of_moment(
    where: Locate, expectation: Expectation, moment: Moment, leg: Leg
) -> Iterator[Check]:
    stands = {
        "leg": leg.name,
        "stage": leg.stage,
        "status": moment.state.status,
        "share": moment.share,
        "paged": moment.paged,
    }
    for name, actual in stands.items():
        expected = getattr(expectation, name)
        if expected is not None:
            yield Check(name, _value(expected), _value(actual), where=where(name))


def _checks(
    where: Locate, expectation: Expectation, contract: Contract, verdict: Verdict
) -> Iterator[Check]:
    decided = _decider([c for c in verdict.cells if c.enforced])
    if expectation.verdict is not None:
        place = where("verdict")
        yield Check("verdict", expectation.verdict, verdict.outcome, decided, place)
    for name, expected in expectation.cells.items():
        own = [c for c in verdict.cells if _is_named(name, c.clause, c.slice)]
        outcomes: list[Outcome] = [c.outcome for c in own if c.outcome != "not applicable"]
        actual = worst(outcomes) if outcomes else "not applicable"
        yield Check(name, expected, actual, _decider(own), where("cells", name))
    if expectation.actions is not None:
        actual = _action_text(asked_for(contract, verdict.cells))
        expected = _action_text(expectation.actions)
        yield Check("actions", expected, actual, decided, where("actions"))
    if expectation.can_promote is not None:
        # a stage may be left where every enforced cell holds, at the stage's size
        may = verdict.outcome == "holds"
        expected, actual = (str(answer).lower() for answer in (expectation.can_promote, may))
        yield Check("can_promote", expected, actual, decided, where("can_promote"))


def _decider(cells: Sequence[CellVerdict]) -> CellVerdict | None:
    """The cell with the worst outcome, of those the one with the largest ratio to its limit."""
    applicable = [cell for cell in cells if cell.outcome != "not applicable"]
    return next(iter(worst_first(applicable)), None)


def _action_text(actions: Sequence[str | Mapping[str, Any]]) -> str:
    """Actions as in contracts, independent of their order."""
    texts = [
        action
        if isinstance(action, str)
        else f"{{{', '.join(f'{name}: {_value(value)}' for name, value in action.items())}}}"
        for action in actions
    ]
    return f"[{', '.join(sorted({*texts}))}]"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
