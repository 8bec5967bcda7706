# Lint: consistency between the parts of a contract, all findings at once.
#
# Each rule is a generator of findings over a contract; the place of a finding is the path of the
# value to change.

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.errors import Problem
from servanda.judgement.lint.clauses import clauses
from servanda.judgement.lint.escalation import escalation
from servanda.judgement.lint.kernels import kernels
from servanda.judgement.lint.objective import learning, trend
from servanda.judgement.lint.routing import routing
from servanda.judgement.lint.runtime import envelope
from servanda.judgement.lint.slices import slices
from servanda.judgement.lint.stages import promotion
from servanda.judgement.lint.workloads import labels, workloads

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks


def check(
    contract: Contract,
    marks: Marks,
    *,
    engines: Collection[str],
    faults: Collection[str] = (),
    broken: Collection[Path] = (),
) -> list[Problem]:
    """The inconsistencies of a contract, in the order of the text.

    Args:
        contract: the parsed contract.
        marks: the places of its values.
        engines, faults: valid names.
        broken: mappings with a value that was already rejected; no findings about them or about the
            whole contract.
    """
    findings = [
        *kernels(contract, engines, faults),
        *workloads(contract),
        *labels(contract),
        *learning(contract),
        *slices(contract),
        *clauses(contract, marks, broken),
        *envelope(contract),
        *trend(contract),
        *escalation(contract),
        *promotion(contract),
        *routing(contract),
    ]
    broken = {path for path in broken if path}
    problems = []
    for f in findings:
        if not any(f.path[:n] in broken for n in range(len(f.path) + 1)):
            place = marks.key(f.path) if f.key else marks.near(f.path)
            where = replace(place, text="") if f.bare else place
            problems.append(Problem(f.message, where, f.hint))
    return sorted(problems, key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0))
