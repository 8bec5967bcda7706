# The promotion as the last link of the chain: a plan, a state and a verdict -> a state, effects;
# and a verdict as it reads one: who, how much, which cells, and what the rules ask for.

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
    """Where a promotion stands after a verdict, and what the world is to be told; pure.

    Args:
        plan: of the leg that was judged; its contract says which legs there are.
        state: where it stood; None: it begins.
        now: unix seconds, never before what the state saw last.

    Returns:
        the state, and effects with a key each: an effect that is delivered twice has one key.

    Raises:
        EvidenceError: the clock went back, or the plan or the verdict is of another leg, or of
            none.
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
    """Of the only run that a key may have: anyone who promotes it again meets the same one."""
    return f"{beginning_of(contract.metadata.name)}{digest_of(to_plain(key))[:8]}"


def beginning_of(name: str) -> str:
    """Of the names of all runs of a contract; of another's too, whose name goes on with -."""
    return f"{name}-"


def leg_finding(contract: Contract, leg: Leg, verdict: Verdict) -> LegFinding:
    """What a look at a leg found.

    Cells that do not exist at the stage, and those that are not enforced, do not count.
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
        # before the first look everything is undecided, and that is no news
        if early and all(c.outcome == "inconclusive" for c in meeting):
            continue
        for do in rule.do:
            action, value = action_of(do)
            if "promotion" in ACTIONS[action].doors:
                results = tuple(map(CellResult.of, meeting))
                yield RuleAction(action, value, results, _condition(rule.when))


def _condition(when: Mapping[str, Any]) -> str:
    """A rule's condition in words: tail is violated, observability is not holds."""
    subject = when.get("clause", when.get("section"))
    return f"{subject} is {when['is']}" if "is" in when else f"{subject} is not {when['is_not']}"
