# The verdict: evidence -> holds, violated, inconclusive, or error, cell by cell.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from servanda.clauses import Cell, CellVerdict, Certificate, Look, Outcome, worst
from servanda.errors import EvidenceError
from servanda.evidence import Evidence, Weighed
from servanda.identity import EvidenceKey
from servanda.plan import Plan

EXIT_CODES: Mapping[Outcome, int] = {"holds": 0, "violated": 1, "inconclusive": 3, "error": 4}
_PRECONDITION = "a precondition failed"


@dataclass(frozen=True)
class Verdict:
    """The answer of a contract, with every cell's.

    Args:
        key: what the evidence speaks of; alpha: what this attempt could spend, of which a
            violation is charged 1/cells.
        groups, sequences, tokens, lost: what the closed rounds hold.
        train, infer: what reports call the two kernels.
    """

    outcome: Outcome
    cells: tuple[CellVerdict, ...]
    contract: str
    stage: str
    key: EvidenceKey
    evidence: str
    confidence: float
    alpha: float
    price_cells: int
    groups: int
    sequences: int
    tokens: int
    lost: int
    golden_tokens: int = 0
    train: str = ""
    infer: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def decided(self) -> bool:
        """Whether more rounds could change nothing that counts."""
        return not any(c.open and c.enforced for c in self.cells)

    @property
    def more(self) -> int | None:
        """Prompt groups that would decide what is open, as a projection."""
        needs = [c.more for c in self.cells if c.open and c.enforced and c.more is not None]
        return max(needs, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a number that does not exist is null, never 0; inf is text."""
        return _plain({**asdict(self), "exit_code": self.exit_code, "more": self.more})

    def __str__(self) -> str:
        from servanda.report.text import render

        return render(self)


def judge(plan: Plan, evidence: Evidence, *, intervals: bool = True) -> Verdict:
    """Judge every cell of a plan on the closed prefix of its evidence; pure.

    Args:
        intervals: False leaves the intervals out, for a look that only decides.

    Raises:
        EvidenceError: the evidence belongs to another plan.
    """
    if evidence.plan != plan.digest:
        raise EvidenceError(
            f"the evidence was weighed for plan {evidence.plan[:8]}, this is {plan.digest[:8]}",
            hint="weigh it again with this plan",
        )
    closed = evidence.closed
    look = Look(plan.alpha, plan.price_cells, plan.first, evidence.launched, intervals)
    cells = []
    for i, cell in enumerate(plan.cells):
        weighed = {"workload": closed, "golden": _some(evidence.golden), "none": ()}
        parts = weighed[cell.kind.source]
        floor = cell.kind.floor(cell, [part.noise[i] for part in parts])
        statistics = [part.statistics[i] for part in parts]
        cells.append(cell.kind.judge(cell, statistics, floor, look))
    cells = _after_preconditions(plan.cells, cells)
    kernels = plan.contract.kernels
    return Verdict(
        outcome=_outcome(cells),
        cells=tuple(cells),
        contract=plan.contract.metadata.name,
        stage=plan.stage,
        key=evidence.key,
        evidence=evidence.digest if intervals else "",
        confidence=plan.contract.confidence,
        alpha=plan.alpha,
        price_cells=plan.price_cells,
        groups=evidence.launched,
        sequences=sum(r.sequences for r in closed),
        tokens=sum(r.tokens for r in closed),
        lost=sum(r.lost for r in closed),
        golden_tokens=evidence.golden.tokens if evidence.golden else 0,
        train=str(kernels.train),
        infer=str(kernels.infer),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _some(golden: Weighed | None) -> tuple[Weighed, ...]:
    return (golden,) if golden is not None else ()


def _outcome(cells: list[CellVerdict]) -> Outcome:
    """The worst of the enforced cells; guards can make it worse, but never carry it."""
    enforced = [c for c in cells if c.enforced]
    promises = [c for c in enforced if c.section != "observability"]
    if all(c.outcome == "not applicable" for c in promises):
        return worst([*(c.outcome for c in enforced), "inconclusive"])
    return worst([c.outcome for c in enforced])


def _after_preconditions(cells: tuple[Cell, ...], verdicts: list[CellVerdict]) -> list[CellVerdict]:
    """Where a guard fails, the numbers are not what they claim, so certificates say nothing."""
    failed = [
        v.clause
        for v in verdicts
        if v.section == "observability" and v.enforced and v.outcome in ("violated", "error")
    ]
    if not failed:
        return verdicts
    note = f"{_PRECONDITION}: {', '.join(dict.fromkeys(failed))}"
    return [
        v.but(outcome="inconclusive", open=False, more=None, note=note)
        if isinstance(cell.kind, Certificate)
        else v
        for cell, v in zip(cells, verdicts, strict=True)
    ]
