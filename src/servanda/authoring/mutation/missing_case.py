# Asking: what no test asks, where a mutant survives; the sentence that says which case is missing.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servanda.contract.clause import Relative, Section
from servanda.contract.model import Clause, Contract
from servanda.contract.policy import Escalation
from servanda.judgement.clauses.scope import slices_of

_MOST = 3  # slices that a sentence names


def confidence(was: float, now: float) -> str:
    low, high = sorted((was, now))
    return f"no answer of a case is certain to {low:g} and not to {high:g}"


def limit(contract: Contract, section: Section, clause: Clause, was: float, now: float) -> str:
    low, high = sorted((was, now))
    of = clause.at_most if clause.at_most is not None else clause.at_least
    times = f" times {of.of}" if isinstance(of, Relative) else ""
    what = quantity(clause)
    return (
        f"no case has {what} {_on(contract, section, clause)} between {low:g} and {high:g}{times}"
    )


def percentile(
    contract: Contract, section: Section, clause: Clause, low: float, high: float
) -> str:
    share = f"{100 * low:.6g} % and {100 * high:.6g} %"
    limit = clause.at_most
    what = "requests" if section == "runtime" else "tokens"
    beyond = "the limit" if isinstance(limit, Relative) or limit is None else f"{limit:g}"
    where = _on(contract, section, clause)
    return f"no case has between {share} of its {what} {where} beyond {beyond}"


def severity(clause: Clause) -> str:
    return f"no case expects a verdict or an action that {clause.id} alone decides"


def clause(clause: Clause) -> str:
    return f"no case expects an answer of {clause.id}, or one that {clause.id} alone decides"


def slice_(name: str) -> str:
    return f"no case expects an answer on {name}, or one that {name} alone decides"


def rule(rule: Escalation) -> str:
    does = ", ".join(map(written, rule.do))
    return f"no case expects {does} where {written(rule.when)} and no other rule asks for it"


def rule_words(rule: Escalation) -> str:
    return f"{written(rule.when)}: {', '.join(map(written, rule.do))}"


def written(part: str | Mapping[str, Any]) -> str:
    """An action, or what a rule watches, nearly as the contract writes it.

    >>> written("hold"), written({"page": "oncall"}), written({"clause": "tv", "is_not": "holds"})
    ('hold', 'page oncall', 'clause tv is not holds')
    """
    if isinstance(part, str):
        return part
    return " ".join(f"{key.replace('_', ' ')} {value}" for key, value in part.items())


def quantity(clause: Clause) -> str:
    """What a limit is held to.

    >>> quantity(Clause(id="t", metric="tv", aggregate="p99", at_most=0.1))
    'p99 of tv'
    """
    return f"{clause.aggregate} of {clause.metric}" if clause.percentile else clause.metric


def _on(contract: Contract, section: Section, clause: Clause) -> str:
    names = slices_of(contract, section, clause)
    return f"on {', '.join(names)}" if len(names) <= _MOST else "on any of its slices"
