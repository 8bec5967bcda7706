# A promotion in virtual time: evaluations at fixed intervals, with the series of a case as data.
#
# The steps are those of a real one (`begin`, `advance`, and actions of people); only the clock and
# the tokens are synthetic.  The series continue with time: data of one step is not repeated on the
# next.

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from servanda.authoring.contract_test.evidence import GrowingEvidence, synthetic_data
from servanda.authoring.contract_test.model import Act, Clock, ContractTest
from servanda.contract.stages import Leg, course_of
from servanda.errors import ContractError, EvidenceError
from servanda.judgement.plan import Plan, make_plan
from servanda.judgement.schedule import Arrivals, Schedule
from servanda.judgement.verdict import Verdict, judge
from servanda.promotion.advance import Move, advance, begin
from servanda.promotion.api import leg_finding
from servanda.promotion.effects import route_of
from servanda.promotion.operator import approve, override, roll_back
from servanda.promotion.state import LegFinding, Override, State, leg_of

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
