# Scope: the slices of a clause.
#
# A slice of outcomes is defined by the sampled token, so an average over it is no property of the
# kernels: only its contribution to the whole is defined.

from __future__ import annotations

from servanda.contract.clause import WHOLE, Clause, Section
from servanda.contract.model import Contract
from servanda.judgement.clauses.chain_metrics import CHAIN, chain_metric
from servanda.judgement.slices.rules import Known, known
from servanda.theory.divergence.base import DIVERGENCES

OUTCOME_METRICS = ("mass_gap", "tv_contribution")


def of_outcomes(metric: str) -> bool:
    """Whether a metric is a contribution, defined on slices of outcomes."""
    if metric in OUTCOME_METRICS:
        return True
    return metric in DIVERGENCES and getattr(DIVERGENCES[metric], "outcome", False)


def known_by_name(contract: Contract) -> dict[str, Known]:
    """Slice -> when it is known; the whole is known before the request."""
    return {WHOLE: "request", **{rule.name: known(rule) for rule in contract.slices}}


def slices_of(contract: Contract, section: Section, clause: Clause) -> tuple[str, ...]:
    """The slices that a clause names, otherwise all on which its metric is defined."""
    if clause.slices is not None:
        return clause.slices
    if section in ("observability", "runtime"):
        return (WHOLE,)
    wanted: tuple[Known, ...] = ("request", "context")
    if of_outcomes(clause.metric):
        wanted = ("outcome",)
    elif clause.metric in CHAIN and chain_metric(contract, clause).known == "request":
        wanted = ("request",)
    return tuple(name for name, when in known_by_name(contract).items() if when in wanted)
