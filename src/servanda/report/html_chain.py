# The bound chain on the page: a tree for each clause that it starts from.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from servanda.contract.model import Contract
from servanda.judgement.bound_chain.chain import chain
from servanda.judgement.bound_chain.steps import Step
from servanda.judgement.verdict import Verdict
from servanda.report import format
from servanda.report.cell_text import KINDS
from servanda.report.chain_text import chain_text
from servanda.report.format import number


class ImpliedStep(NamedTuple):
    """One number of the chain, and those that follow from it.

    Args:
        by: the theorem by which it follows.
    """

    what: str
    number: str
    standing: str
    by: str
    vacuous: bool
    then: tuple[ImpliedStep, ...]


class Implied(NamedTuple):
    """The chain as a tree for each clause, in one line, and as text."""

    summary: str
    paths: tuple[tuple[str, tuple[ImpliedStep, ...]], ...]
    text: str


def implied(contract: Contract | None, verdict: Verdict) -> Implied | None:
    """The chain of a verdict; None where the text of its contract was not kept."""
    bounds = chain(contract, verdict) if contract else None
    if bounds is None or not bounds.steps:
        return None
    total = format.count(len(bounds.steps), "number")
    if bounds.vacuous:
        total += f", {len(bounds.vacuous)} of them vacuous (no smaller than the range)"
    paths: dict[str, list[Step]] = {}
    for step in bounds.steps:
        name = step.clause if step.enforced else f"{step.clause} (monitored)"
        paths.setdefault(name, []).append(step)
    trees = tuple((name, _tree(steps)) for name, steps in paths.items())
    return Implied(total, trees, chain_text(bounds))


def _tree(steps: Sequence[Step]) -> tuple[ImpliedStep, ...]:
    """Steps in their order, each with those that come after it at a deeper level."""
    firsts = [i for i, step in enumerate(steps) if step.level <= steps[0].level]
    return tuple(
        ImpliedStep(
            steps[i].what,
            "vacuous"
            if steps[i].vacuous
            else f"≤ {number(steps[i].number)} {steps[i].unit}".strip(),
            KINDS.get(steps[i].standing, steps[i].standing),
            steps[i].theorem,
            steps[i].vacuous,
            _tree(steps[i + 1 : end]) if end > i + 1 else (),
        )
        for i, end in zip(firsts, [*firsts[1:], len(steps)], strict=True)
    )
