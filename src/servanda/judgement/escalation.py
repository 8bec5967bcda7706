# Escalation: which rules of a contract are met by the cells of a verdict.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servanda.contract.model import Contract
from servanda.contract.policy import Escalation
from servanda.judgement.clauses.base import CellVerdict, worst


def watched(when: Mapping[str, Any], cells: Sequence[CellVerdict]) -> list[CellVerdict]:
    """The cells that a rule concerns: a clause's, enforced or not; a section's enforced ones.

    None where it concerns traffic, which is the gateway's.
    """
    judged = [c for c in cells if c.outcome != "not applicable"]
    if "clause" in when:
        return [c for c in judged if c.clause == when["clause"]]
    return [c for c in judged if c.section == when.get("section") and c.enforced]


def is_met(when: Mapping[str, Any], of: Sequence[CellVerdict]) -> bool:
    """Whether a rule is met by the cells that it concerns; by none it is not."""
    if not of:
        return False
    state = worst([c.outcome for c in of])
    return state == when["is"] if "is" in when else state != when["is_not"]


def rules_met(
    contract: Contract, cells: Sequence[CellVerdict]
) -> Iterator[tuple[Escalation, list[CellVerdict]]]:
    """The rules that are met, in order, each with the cells that it concerns."""
    for rule in contract.escalation:
        of = watched(rule.when, cells)
        if is_met(rule.when, of):
            yield rule, of


def action_of(do: str | Mapping[str, Any]) -> tuple[str, str]:
    """Name and value of an action as it is written; "" where it has no value.

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
    """The actions of every rule that is met as they are written, each once, in order."""
    actions: list[str | Mapping[str, Any]] = []
    for rule, _ in rules_met(contract, cells):
        actions += [do for do in rule.do if do not in actions]
    return tuple(actions)


def actions_of(contract: Contract, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """Names of the actions of every rule that is met, in the order of the contract."""
    return tuple(dict.fromkeys(action_of(do)[0] for do in asked_for(contract, cells)))
