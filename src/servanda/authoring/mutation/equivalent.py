# Equivalent mutants: those that no data can distinguish, each with the proof.

from __future__ import annotations

from collections.abc import Mapping

from servanda.authoring.mutation.missing_case import rule_text
from servanda.authoring.mutation.mutants import Mutant
from servanda.contract.clause import STAGES
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.judgement.clause_kinds import Later, NotHere
from servanda.judgement.clauses.base import Cell
from servanda.judgement.plan import draft
from servanda.traces.corpus import Corpus

Texts = tuple[Mapping[str, Corpus], Corpus | None]  # of each workload, and the golden ones


def proof(mutant: Mutant, contract: Contract, texts: Texts) -> str:
    """Why no data can distinguish a mutant from its contract; "" if no reason is known.

    Most survivors have none: that no test notices a change does not make it one of no account.
    """
    if mutant.kind == "escalation":
        return _asked_twice(contract, int(mutant.place[-1]))
    if mutant.kind == "severity":
        return _added_again(mutant, contract, texts)
    if mutant.kind == "limit" and mutant.clause:
        return _never_judged(mutant, contract, texts)
    return ""


def _asked_twice(contract: Contract, i: int) -> str:
    """Another rule is met with it, and asks for all that it asks for."""
    rule = contract.escalation[i]
    for j, other in enumerate(contract.escalation):
        if j != i and other.when == rule.when and all(do in other.do for do in rule.do):
            return (
                f"rule {j + 1} is met whenever {rule_text(rule.when)} too, and asks for the same: "
                "an action is taken once"
            )
    return ""


def _added_again(mutant: Mutant, contract: Contract, texts: Texts) -> str:
    """A guard that is only shown, and that every plan adds where none is enforced."""
    for leg in course_of(contract):
        before, after = (
            [_judged(cell) for cell in draft(v, *texts, leg=leg)[0].cells if cell.clause.enforced]
            for v in (contract, mutant.contract)
        )
        if len(before) != len(after) or any(before.count(c) != after.count(c) for c in before):
            return ""
    return "a plan adds this precondition, with the same limit, where a contract enforces none"


def _judged(cell: Cell) -> tuple[object, ...]:
    """All that a cell's answer hangs on; its name is not of it."""
    clause = cell.clause
    bare = clause.model_copy(update={"id": "", "slices": None, "stages": STAGES, "workload": None})
    return (bare, cell.section, cell.cut, cell.claim, cell.capacity, cell.kind, cell.workload)


def _never_judged(mutant: Mutant, contract: Contract, texts: Texts) -> str:
    """On every leg its cells are of kinds that look at no limit, before and after."""
    reasons: list[str] = []
    for leg in course_of(contract):
        for version in (contract, mutant.contract):
            plan, _ = draft(version, *texts, leg=leg)
            own = [cell for cell in plan.cells if cell.clause.id == mutant.clause]
            for cell in own:
                if not isinstance(cell.kind, NotHere | Later):
                    return ""
                reasons.append(cell.kind.reason)
    if not reasons:
        return ""
    legs = ", ".join(leg.name for leg in course_of(contract))
    return f"{mutant.clause} is not judged at {legs}: {reasons[0]}"
