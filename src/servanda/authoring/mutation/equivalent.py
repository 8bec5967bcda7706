# Equivalent mutants: those that nobody can tell apart, each with the proof that nobody can.

from __future__ import annotations

from collections.abc import Mapping

from servanda.authoring.mutation.missing_case import written
from servanda.authoring.mutation.mutants import Mutant
from servanda.contract.clause import STAGES
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.judgement.clause_kinds import Later, NotHere
from servanda.judgement.clauses.base import Cell
from servanda.judgement.plan import draft
from servanda.traces.corpus import Corpus


def proof(
    mutant: Mutant, contract: Contract, corpora: Mapping[str, Corpus], golden: Corpus | None
) -> str:
    """Why no data can tell a mutant from its contract, by construction; "" where none is known.

    Most survivors have none: that no test notices a change does not make it one of no account.
    """
    if mutant.kind == "escalation":
        return _asked_twice(contract, int(mutant.place[-1]))
    if mutant.kind == "severity":
        return _added_again(mutant, contract, corpora, golden)
    if mutant.kind == "limit" and mutant.clause:
        return _never_judged(mutant, contract, corpora, golden)
    return ""


def _asked_twice(contract: Contract, i: int) -> str:
    """Another rule is met with it, and asks for all that it asks for."""
    rule = contract.escalation[i]
    for j, other in enumerate(contract.escalation):
        if j != i and other.when == rule.when and all(do in other.do for do in rule.do):
            return (
                f"rule {j + 1} is met whenever {written(rule.when)} too, and asks for the same: "
                "an action is taken once"
            )
    return ""


def _added_again(
    mutant: Mutant, contract: Contract, corpora: Mapping[str, Corpus], golden: Corpus | None
) -> str:
    """A guard that is only shown, and that every plan adds where none is enforced."""
    for leg in course_of(contract):
        before, after = (
            [
                _judged(cell)
                for cell in draft(v, corpora, golden, leg=leg)[0].cells
                if cell.clause.enforced
            ]
            for v in (contract, mutant.contract)
        )
        if len(before) != len(after) or any(before.count(c) != after.count(c) for c in before):
            return ""
    return "a plan adds this precondition, with the same limit, where a contract enforces none"


def _judged(cell: Cell) -> tuple[object, ...]:
    """All that a cell's answer hangs on; its name is not of it."""
    clause = cell.clause
    said = clause.model_copy(update={"id": "", "slices": None, "stages": STAGES, "workload": None})
    return (said, cell.section, cell.cut, cell.claim, cell.capacity, cell.kind, cell.workload)


def _never_judged(
    mutant: Mutant, contract: Contract, corpora: Mapping[str, Corpus], golden: Corpus | None
) -> str:
    """On every leg its cells are of kinds that look at no limit, before and after."""
    reasons: list[str] = []
    for leg in course_of(contract):
        for version in (contract, mutant.contract):
            plan, _ = draft(version, corpora, golden, leg=leg)
            own = [cell for cell in plan.cells if cell.clause.id == mutant.clause]
            found = [_unjudged(cell) for cell in own]
            if not all(found):
                return ""
            reasons += found
    if not reasons:
        return ""
    legs = ", ".join(leg.name for leg in course_of(contract))
    return f"{mutant.clause} is not judged at {legs}: {reasons[0]}"


def _unjudged(cell: Cell) -> str:
    return cell.kind.reason if isinstance(cell.kind, NotHere | Later) else ""
