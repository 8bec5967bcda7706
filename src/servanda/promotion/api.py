# The promotion as a pure function: plan, state and verdict -> state and notifications; and the part
# of a verdict that it reads: builds, sample sizes, cells, and the actions of rules.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from servanda.contract.actions import ACTIONS
from servanda.contract.identity import EvidenceKey, digest_of
from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of
from servanda.errors import EvidenceError
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.escalation import action_of, rules_met
from servanda.promotion.advance import advance as advanced
from servanda.promotion.advance import begin, leg_of
from servanda.promotion.state import CellResult, Effect, LegFinding, RuleAction, State
from servanda.traces.serialization import to_plain

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan
    from servanda.judgement.verdict import Verdict


def advance(
    plan: Plan, state: State | None, verdict: Verdict, *, now: float
) -> tuple[State, tuple[Effect, ...]]:
    """The state of a promotion after a verdict, and the notifications that follow; pure.

    Args:
        plan: plan of the judged step; its contract defines the steps.
        state: the state before; None: a new promotion.
        now: unix seconds, not before the latest time of the state.

    Returns:
        the state, and notifications, each with a key that is the same for repeated deliveries.

    Raises:
        EvidenceError: the clock went back, or the plan or the verdict is for another step or none.
    """
    course = course_of(plan.contract)
    begun: tuple[Effect, ...] = ()
    if state is None:
        name = run_name(plan.contract, verdict.key)
        state, begun = begin(name, verdict.key, course, now=now)
    leg = leg_of(course, state)
    for what, name in (("plan", plan.leg.name if plan.leg else ""), ("verdict", verdict.leg)):
        if name != leg.name:
            raise EvidenceError(
                f"the {what} is for {name or 'no step'}, and promotion {state.run} is at "
                f"{leg.name}",
                hint="judge that step: each has evidence and a share of alpha of its own; "
                "compile(contract, leg=...) plans it, and course_of(contract) lists the steps",
            )
    after, effects = advanced(course, state, leg_finding(plan.contract, leg, verdict), now=now)
    return after, (*begun, *effects)


def run_name(contract: Contract, key: EvidenceKey) -> str:
    """The name of a key's only run: promoting the key again continues it."""
    return f"{beginning_of(contract.metadata.name)}{digest_of(to_plain(key))[:8]}"


def beginning_of(name: str) -> str:
    """The prefix of the names of a contract's runs, and of contracts named NAME-..."""
    return f"{name}-"


def leg_finding(contract: Contract, leg: Leg, verdict: Verdict) -> LegFinding:
    """The finding of an evaluation of a step.

    Cells that do not apply at the stage, and those that are not enforced, do not count.
    """
    clauses = (*DEFAULT_GUARDS, *(clause for *_, clause in contract.clauses()))
    least = {clause.metric for clause in clauses if clause.at_least is not None}
    return LegFinding(
        leg=leg.name,
        key=verdict.key,
        groups=verdict.groups,
        evidence=verdict.evidence,
        cells=tuple(
            CellResult.of(c, at_least=c.metric in least)
            for c in verdict.cells
            if c.enforced and c.outcome != "not applicable"
        ),
        asked=tuple(_rule_actions(contract, verdict, early=verdict.groups < leg.first)),
    )


def _rule_actions(contract: Contract, verdict: Verdict, *, early: bool) -> Iterator[RuleAction]:
    for rule, cells in rules_met(contract, verdict.cells):
        wanted, equal = rule.when.get("is", rule.when.get("is_not")), "is" in rule.when
        meeting = [cell for cell in cells if (cell.outcome == wanted) == equal]
        # before the first evaluation every cell is undecided: no notification
        if early and all(c.outcome == "inconclusive" for c in meeting):
            continue
        for do in rule.do:
            action, value = action_of(do)
            if "promotion" in ACTIONS[action].doors:
                results = tuple(map(CellResult.of, meeting))
                yield RuleAction(action, value, results, _condition(rule.when))


def _condition(when: Mapping[str, Any]) -> str:
    """A rule's condition as text: tail is violated, observability is not holds."""
    subject = when.get("clause", when.get("section"))
    return f"{subject} is {when['is']}" if "is" in when else f"{subject} is not {when['is_not']}"
