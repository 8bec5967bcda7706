# The chart of a run: its steps so far against a reference, as cells of a verdict.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import CALIBRATE_TREND, WHOLE, Trend
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.verdict import Verdict
from servanda.registry import did_you_mean
from servanda.report.format import count
from servanda.rl.trend.followed_metric import followed
from servanda.rl.trend.reference import Reference, read_reference
from servanda.theory.stats.change import CLIP

ANY = Trend.model_construct()
TREND = "trend"  # the clause's name, and its section
_FIRST = "the first step of a run is no reference: its weights are as the engine loaded them"


@dataclass(frozen=True)
class _Entry:
    """A step on the chart: S after it, and how often each metric was measured and missing."""

    step: int
    state: NDArray[np.float64]
    known: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass
class RunChart:
    """The steps of a run against a reference.

    Args:
        clause: what a contract asks.
    """

    reference: Reference
    clause: Trend = ANY
    _first: int | None = None
    _entries: list[_Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.clause.metrics:
            if name not in self.reference.metrics:
                raise ContractError(
                    f"the reference has no metric {name!r}",
                    hint=did_you_mean(name, self.reference.metrics),
                )

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.clause.metrics or self.reference.metrics

    def add(self, step: int, values: Mapping[str, float]) -> tuple[CellVerdict, ...]:
        """Add a step, and judge it; a step that the chart has replaces it and all later ones.

        Args:
            values: name -> number, of what was measured; without any, the step counts as missing.
        """
        if self._first is None or step <= self._first:
            self._first = step
            self._entries.clear()
            return tuple(self._cell(name, "not applicable", _FIRST) for name in self.metrics)
        while self._entries and self._entries[-1].step >= step:
            self._entries.pop()
        of, none = self.reference, (0,) * len(self.reference.metrics)
        last = self._entries[-1] if self._entries else _Entry(step, of.detector.start(), none, none)
        x_M = of.row(values)
        lost = [math.isnan(x) for x in x_M]
        entry = _Entry(
            step,
            of.detector.advance(last.state, x_M),
            tuple(n + (not gone) for n, gone in zip(last.known, lost, strict=True)),
            tuple(n + gone for n, gone in zip(last.missing, lost, strict=True)),
        )
        self._entries.append(entry)
        value_M = of.detector.values(entry.state)
        cells = []
        for name in self.metrics:
            m = of.metrics.index(name)
            value = float(value_M[m])
            note = "" if lost[m] else self._note(m, x_M[m])
            outcome: Outcome = "violated" if value > 1 else "holds"
            if lost[m] and outcome == "holds":
                outcome, note = "inconclusive", f"{name} was not measured at this step"
            counts = {"n": entry.known[m], "missing": entry.missing[m]}
            cells.append(self._cell(name, outcome, note, value=value, **counts))
        return tuple(cells)

    @property
    def since(self) -> int | None:
        """The first step of the change that still lasts; None without one."""
        since = None
        at = [self.reference.metrics.index(name) for name in self.metrics]
        for entry in reversed(self._entries):
            if not (self.reference.detector.values(entry.state)[at] > 1).any():
                break
            since = entry.step
        return since

    def _note(self, m: int, x: float) -> str:
        """How far a value is from the good runs', in the fold that is nearest to it."""
        name, folds = self.reference.metrics[m], self.reference.detector.folds
        fold = min(folds, key=lambda fold: abs(x - fold.centre_M[m]))
        of, centre, scale = followed(name), fold.centre_M[m], fold.scale_M[m]
        apart = of.told(x - centre)
        steps = count(int(self.reference.detector.delay()), "step")
        return (
            f"{apart} of the good runs' mean, whose steps differ by {of.told(scale)}; "
            f"a lasting {of.told(CLIP * scale)} is found within {steps}"
        )

    def _cell(self, name: str, outcome: Outcome, note: str, **numbers: Any) -> CellVerdict:
        return CellVerdict(
            TREND,
            TREND,
            name,
            "",
            WHOLE,
            outcome,
            kind="estimate" if self.reference.detector.false_alarms is None else "guard",
            claim="realised",
            severity=self.clause.severity,
            enforced=self.clause.enforced,
            limit=1.0 if numbers else None,
            units="steps" if numbers else "",
            note=note,
            **numbers,
        )


def chart_of(contract: Contract) -> RunChart | None:
    """The chart of a contract's trend; None without one.

    Raises:
        ContractError: the reference cannot be read, or is another one.
    """
    if contract.trend is None:
        return None
    clause = contract.trend
    if not clause.reference:
        raise ContractError("trend names no reference", hint=CALIBRATE_TREND)
    return RunChart(read_reference(Path(clause.reference), clause.digest), clause)


def chart_for(reference: Path | None, contract: Contract | None) -> RunChart | None:
    """The chart of a followed run: against a given reference, or that of its contract.

    Raises:
        ContractError: the reference cannot be read, or is another one.
    """
    if reference is not None:
        clause = (contract.trend if contract is not None else None) or ANY
        return RunChart(read_reference(reference), clause)
    return chart_of(contract) if contract is not None else None


def with_reference(contract: Contract, reference: str | Path | None) -> Contract:
    """A contract whose trend is held to a reference, which then counts in its digest.

    Args:
        reference: its file; None: that of the contract, if any.

    Raises:
        ContractError: the reference cannot be read, or is another one.
    """
    clause = contract.trend
    if reference is not None:
        named = {"reference": str(reference), "digest": None}
        clause = (clause or ANY).model_copy(update=named)
    if clause is None:
        return contract
    found = chart_of(contract.model_copy(update={"trend": clause}))
    assert found is not None
    clause = clause.model_copy(update={"digest": found.reference.digest})
    return contract.model_copy(update={"trend": clause})


def changed(cells: Sequence[CellVerdict]) -> str:
    """The sentence about a change; "" without one."""
    red = [c for c in cells if c.section == TREND and c.outcome == "violated"]
    if not red:
        return ""
    worst_of = max(red, key=lambda cell: cell.value or 0.0)
    return f"the gap has changed: {worst_of.metric} is {worst_of.note.partition(',')[0]}"


def joined(verdict: Verdict, cells: Sequence[CellVerdict]) -> Verdict:
    """A verdict on a step with the cells of its trend."""
    outcome = joined_outcome(verdict.outcome, cells)
    return replace(verdict, cells=(*verdict.cells, *cells), outcome=outcome)


def joined_outcome(outcome: Outcome, cells: Sequence[CellVerdict]) -> Outcome:
    """The outcome of a step with the cells of its trend."""
    asked = (c for c in cells if c.enforced and c.outcome != "not applicable")
    return worst([outcome, *(cell.outcome for cell in asked)])
