# Escalation of a contract at one step: which actions its rules ask for.

from __future__ import annotations

from collections.abc import Sequence

from servanda.clauses import CellVerdict, Outcome, worst
from servanda.contract import Contract


def actions_of(contract: Contract, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """Names of the actions of every rule that is met, in the order of the contract.

    A rule on a clause or a section looks at its enforced cells; one on traffic is never met,
    for a trainer has none.
    """
    found: list[str] = []
    for rule in contract.escalation:
        outcomes: list[Outcome] = [
            c.outcome
            for c in cells
            if c.enforced
            and c.outcome != "not applicable"
            and (rule.when.get("clause") == c.clause or rule.when.get("section") == c.section)
        ]
        if not outcomes:
            continue
        state = worst(outcomes)
        met = state == rule.when["is"] if "is" in rule.when else state != rule.when["is_not"]
        if met:
            found += [do if isinstance(do, str) else next(iter(do)) for do in rule.do]
    return tuple(dict.fromkeys(found))
