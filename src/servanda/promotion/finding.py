# A verdict as a promotion reads it: who, how much, which cells, and what the rules ask for.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from servanda.contract.actions import ACTIONS
from servanda.contract.model import Contract
from servanda.contract.stages import Leg
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.escalation import action_of, rules_met
from servanda.promotion.state import CellResult, LegFinding, RuleAction

if TYPE_CHECKING:
    from servanda.judgement.verdict import Verdict


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
        meeting = [c for c in cells if _meets(rule.when, c)]
        # before the first look everything is undecided, and that is no news
        if early and all(c.outcome == "inconclusive" for c in meeting):
            continue
        for do in rule.do:
            action, value = action_of(do)
            if "promotion" in ACTIONS[action].doors:
                yield RuleAction(
                    action, value, tuple(map(CellResult.of, meeting)), _condition(rule.when)
                )


def _condition(when: Mapping[str, Any]) -> str:
    """A rule's condition in words: tail is violated, observability is not holds."""
    subject = when.get("clause", when.get("section"))
    return f"{subject} is {when['is']}" if "is" in when else f"{subject} is not {when['is_not']}"


def _meets(when: Mapping[str, Any], cell: CellVerdict) -> bool:
    return cell.outcome == when["is"] if "is" in when else cell.outcome != when["is_not"]
