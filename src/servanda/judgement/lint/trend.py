# Lint of the trend: it has a reference, and a trainer's steps to compare with it.

from __future__ import annotations

from collections.abc import Iterator

from servanda.contract.clause import CALIBRATE_TREND
from servanda.contract.finding import Finding
from servanda.contract.model import EXTERNAL, Contract


def trend(contract: Contract) -> Iterator[Finding]:
    """Check that a trend can be judged."""
    clause, kernels = contract.trend, contract.kernels
    if clause is None:
        return
    if not clause.reference:
        yield Finding(("trend",), "trend names no reference of good runs", CALIBRATE_TREND)
    if {kernels.train.engine, kernels.infer.engine} != {EXTERNAL}:
        message = "trend is judged over the steps of a trainer, and servanda runs these kernels"
        hint = "write engine: external for both kernels, or leave trend out"
        yield Finding(("trend",), message, hint, key=True)
    for i, rule in enumerate(contract.escalation):
        masks = "trend" in (rule.when.get("clause"), rule.when.get("section")) and "mask" in rule.do
        if masks:
            message = "trend is about all tokens of a step, and mask leaves out a slice"
            yield Finding(("escalation", i, "do"), message, "write halt, correct or {page: oncall}")
    for _, place, other in contract.clauses():
        if other.id == "trend":
            yield Finding((*place, "id"), "trend is the name of the contract's trend", "rename it")
