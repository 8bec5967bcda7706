# Lint: what one part of a contract means for another, all findings at once.
#
# Each rule is a generator of findings over a contract; the place of a finding is the path
# of the value that is to be changed.

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from servanda.contract import Contract
from servanda.errors import Problem, Where
from servanda.lint.clauses import clauses
from servanda.lint.escalation import escalation
from servanda.lint.finding import Finding
from servanda.lint.kernels import kernels
from servanda.lint.learning import learning
from servanda.lint.routing import routing
from servanda.lint.runtime import RUNTIME_METRICS, envelope
from servanda.lint.slices import slices
from servanda.lint.stages import promotion
from servanda.lint.workloads import labels, workloads
from servanda.marks import Marks, Path

__all__ = ["RUNTIME_METRICS", "check"]


def check(
    contract: Contract,
    marks: Marks,
    *,
    engines: Collection[str],
    faults: Collection[str] = (),
    broken: Collection[Path] = (),
) -> list[Problem]:
    """What is wrong between the parts of a contract, in the order of the text.

    Args:
        contract: the values.
        marks: their places.
        engines, faults: names that a kernel may use.
        broken: mappings in which a value was wrong already and is not as its author wrote
            it; nothing is said about them, nor about the contract as a whole.
    """
    findings = [
        *kernels(contract, engines, faults),
        *workloads(contract),
        *labels(contract),
        *learning(contract),
        *slices(contract),
        *clauses(contract, marks, broken),
        *envelope(contract),
        *escalation(contract),
        *promotion(contract),
        *routing(contract),
    ]
    broken = {path for path in broken if path}
    problems = [
        Problem(f.message, _where(f, marks), f.hint)
        for f in findings
        if not any(f.path[:n] in broken for n in range(len(f.path) + 1))
    ]
    return sorted(problems, key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0))


def _where(finding: Finding, marks: Marks) -> Where:
    found = marks.key(finding.path) if finding.key else marks.near(finding.path)
    return replace(found, text="") if finding.bare else found
