# Escalation: the rules of a contract that the cells of a verdict satisfy.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servanda.contract.model import Contract
from servanda.contract.policy import Escalation
from servanda.judgement.clauses.base import CellVerdict, worst


def watched(when: Mapping[str, Any], cells: Sequence[CellVerdict]) -> list[CellVerdict]:
    """The cells of a rule: a clause's, enforced or not; a section's enforced ones.

    None for rules about traffic, which the gateway applies.
    """
    judged = [c for c in cells if c.outcome != "not applicable"]
    if "clause" in when:
        return [c for c in judged if c.clause == when["clause"]]
    return [c for c in judged if c.section == when.get("section") and c.enforced]


def is_met(when: Mapping[str, Any], of: Sequence[CellVerdict]) -> bool:
    """Whether the cells of a rule satisfy it; false without cells."""
    if not of:
        return False
    state = worst([c.outcome for c in of])
    return state == when["is"] if "is" in when else state != when["is_not"]


def rules_met(
    contract: Contract, cells: Sequence[CellVerdict]
) -> Iterator[tuple[Escalation, list[CellVerdict]]]:
    """The satisfied rules, in order, each with its cells."""
    for rule in contract.escalation:
        of = watched(rule.when, cells)
        if is_met(rule.when, of):
            yield rule, of


def action_of(do: str | Mapping[str, Any]) -> tuple[str, str]:
    """Name and value of an action as written; "" without a value.

    >>> action_of("hold"), action_of({"page": "oncall"})
    (('hold', ''), ('page', 'oncall'))
    """
    if isinstance(do, str):
        return do, ""
    ((name, value),) = do.items()
    return name, str(value)


def asked_for(
    contract: Contract, cells: Sequence[CellVerdict]
) -> tuple[str | Mapping[str, Any], ...]:
    """The actions of all satisfied rules as written, each once, in order."""
    actions: list[str | Mapping[str, Any]] = []
    for rule, _ in rules_met(contract, cells):
        actions += [do for do in rule.do if do not in actions]
    return tuple(actions)


def actions_of(contract: Contract, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """Names of the actions of all satisfied rules, in the order of the contract."""
    return tuple(dict.fromkeys(action_of(do)[0] for do in asked_for(contract, cells)))
