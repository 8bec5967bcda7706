# Lint: what one part of a contract means for another, all findings at once.
#
# Each rule is a generator of findings over a contract; the place of a finding is the path
# of the value that is to be changed.

from __future__ import annotations

from collections.abc import Collection, Iterator

from servanda.contract import Contract
from servanda.errors import Problem
from servanda.lint.clauses import KNOWN_LATER, clauses
from servanda.lint.escalation import escalation
from servanda.lint.finding import Finding
from servanda.lint.kernels import envelope, kernels, workload
from servanda.lint.slices import slices
from servanda.marks import Marks, Path

__all__ = ["KNOWN_LATER", "check"]


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
        *workload(contract),
        *slices(contract),
        *clauses(contract, marks),
        *envelope(contract),
        *escalation(contract),
        *promotion(contract),
    ]
    broken = {path for path in broken if path}
    problems = [
        Problem(f.message, marks.key(f.path) if f.key else marks.near(f.path), f.hint)
        for f in findings
        if not any(f.path[:n] in broken for n in range(len(f.path) + 1))
    ]
    return sorted(problems, key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0))


def promotion(contract: Contract) -> Iterator[Finding]:
    """Sizes of the stages."""
    for stage, rule in contract.promotion:
        sequences = getattr(rule, "sequences", None)
        if sequences is None:
            continue
        first, limit = sequences
        path = ("promotion", stage, "sequences")
        if first < 1:
            message = f"the first look at {stage} comes after at least 1 prompt group, not {first}"
            yield Finding(path, message, "write [first look, limit], such as [400, 6000]")
        elif first > limit:
            message = f"the first look at {stage} ({first}) comes after the limit ({limit})"
            yield Finding(path, message, f"did you mean [{limit}, {first}]?")
