# The verdicts of `check DIR` on each training step, and those that join the whole verdict.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import StepPoint, StepRow, StepSeries
from servanda.judgement.clauses.base import Cell, CellVerdict, worst
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import excess
from servanda.report.format import count
from servanda.rl.dumps.checks import Finding, Soundness, errors_of, of_step
from servanda.rl.dumps.soundness import DataLine, sides
from servanda.rl.dumps.statistics import of_step as of_plan
from servanda.rl.dumps.step_part import StepPart
from servanda.rl.dumps.steps import since
from servanda.rl.dumps.window import Window
from servanda.rl.trend.run_chart import RunChart, joined
from servanda.theory.stats.interval import interval

SHOWN = 6  # most cells of single steps in a verdict
_SERIES = 4  # most cells with a series over steps: the whole, and the worst slices
_REASONS = 3  # most steps with unsound data that are listed
_STEP = "step-"


@dataclass
class JudgedSteps:
    """Judges each step of a dump.

    Args:
        alone: whether the dump has one step, whose data is checked as that of the dump.
        chart: its steps against good runs; None: not asked.
    """

    window: Window
    alone: bool = False
    chart: RunChart | None = None
    rows: list[StepRow] = field(default_factory=list)
    red: list[CellVerdict] = field(default_factory=list)
    trend: dict[str, CellVerdict] = field(default_factory=dict)  # metric -> first change, or last
    unsound: dict[int, str] = field(default_factory=dict)  # step -> why it cannot be evidence
    _processes: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)

    def judge(self, plan: Plan, part: StepPart, sound: Soundness, before: Soundness) -> None:
        """Judge the next step.

        Args:
            sound: its data quality checks; before: those of the earlier steps.
        """
        trained, drawn = of_plan(plan, part)
        weighed = part.weighed
        findings: tuple[Finding, ...] = ()
        if not self.alone:
            findings = (*sound.findings_after(before), *sides(plan.contract, weighed.agreement))
            findings = tuple(map(of_step, findings))
        errors = errors_of(findings)
        judged = self.window.judge(
            part.number, part.step, plan, trained, drawn, part.atoms, errors, intervals=False
        )
        if judged.errors and not self.alone:
            self.unsound[part.step] = judged.errors[0]
        if self.chart is not None:
            values = {} if judged.errors else part.scalars.values
            at = step_slice(part.step, part.step, WHOLE)
            for cell in self.chart.add(part.step, values):
                known = self.trend.get(cell.metric)
                if known is None or known.outcome != "violated":  # the first change stays
                    red = cell.outcome == "violated"
                    self.trend[cell.metric] = cell.but(slice=at) if red else cell
        for i, (planned, statistic) in enumerate(zip(plan.cells, weighed.statistics, strict=True)):
            if _over_steps(planned):
                self._processes.setdefault(i, []).append((part.step, statistic.process))
        violated = [c for c in judged.cells if c.enforced and c.outcome == "violated"]
        for cell, planned, statistic in zip(
            judged.cells, plan.cells, weighed.statistics, strict=True
        ):
            if cell not in violated:
                continue
            first = judged.together.get(cell.slice, part.step)
            own = cell.but(slice=step_slice(first, part.step, cell.slice))
            if cell.slice not in judged.together and isinstance(planned.kind, Certificate):
                feed = planned.kind.feed
                low, high = interval(statistic.process, plan.alpha, feed.limit, feed.best)
                own = own.but(interval=(feed.value(low), feed.value(high)))
            self.red.append(own)
        sums = part.portrait.total
        self.rows.append(
            StepRow(
                part.step,
                judged.outcome if part.trained or judged.errors else "inconclusive",
                part.sequences,
                part.trained,
                _finite(sums.mean("tv")),
                _finite(sums.mean("abs_log_ratio")),
                _finite(sums.mean("exp_abs")),
                _finite(sums.mean("k3")),
                tuple(f"{c.clause}[{c.slice}]" for c in violated),
                judged.together.get(WHOLE),
            )
        )

    def series(self, plan: Plan, verdict: Verdict) -> tuple[StepSeries, ...]:
        """The series of the whole and its worst slices over the steps; empty for one step."""
        if len(self.rows) < 2:
            return ()
        kept = [(i, verdict.cells[i]) for i in self._processes]
        kept.sort(key=lambda pair: (pair[1].slice != WHOLE, -excess(pair[1])))
        return tuple(self._series(plan, i, cell) for i, cell in kept[:_SERIES])

    def _series(self, plan: Plan, i: int, cell: CellVerdict) -> StepSeries:
        kind, points = plan.cells[i].kind, []
        assert isinstance(kind, Certificate)
        feed = kind.feed
        for step, process in self._processes[i]:
            n = int(process.known)
            ends = (
                map(feed.value, interval(process, plan.alpha, feed.limit, feed.best))
                if n
                else (None, None)
            )
            mean = feed.value(process.total / process.known) if n else None
            points.append(StepPoint(step, n, mean, *ends))
        limit = feed.value(feed.limit)
        first = since([(point.step, point.mean) for point in points], limit)
        return StepSeries(
            cell.clause, cell.metric, cell.slice, limit, 1 - plan.alpha, first, tuple(points)
        )

    def lines(self) -> tuple[DataLine, ...]:
        """Steps with unsound data, which the whole dump may hide."""
        if len(self.rows) < 2:
            return ()
        lines = [DataLine("error", f"step {n}: {why}") for n, why in self.unsound.items()]
        more = len(lines) - _REASONS
        if more > 0:
            lines[_REASONS:] = [
                DataLine("error", f"{count(more, 'more step')} whose data is not sound")
            ]
        return tuple(lines)

    def joined(self, verdict: Verdict) -> Verdict:
        """The verdict on the whole, violated if any step is.

        Adds the worst violated cells of steps for clauses and slices that are not violated on the
        whole.  A dump of one step is unchanged.
        """
        if len(self.rows) < 2:
            return verdict
        verdict = joined(verdict, [*self.trend.values()])
        known = {(c.clause, c.slice) for c in verdict.cells if c.outcome == "violated"}
        fresh = [c for c in self.red if (c.clause, slice_of(c.slice)) not in known]
        shown = _spread(fresh)
        outcome = worst([verdict.outcome, "violated"]) if self.red else verdict.outcome
        return replace(verdict, outcome=outcome, cells=(*verdict.cells, *shown))


def _spread(cells: Sequence[CellVerdict]) -> list[CellVerdict]:
    """The worst cells, without slices of a step that is violated as a whole."""
    whole = {c.slice for c in cells if " " not in c.slice}
    best: dict[tuple[str, str], CellVerdict] = {}
    for cell in cells:
        step, _, slice_ = cell.slice.partition(" ")
        if slice_ and step in whole:
            continue
        key = (step, "" if slice_ else cell.clause)
        if key not in best or excess(cell) > excess(best[key]):
            best[key] = cell
    return sorted(best.values(), key=lambda c: -excess(c))[:SHOWN]


def step_slice(first: int, step: int, slice_: str) -> str:
    """The slice name of a cell of one step, or of several steps together.

    >>> step_slice(6, 6, "all"), step_slice(4, 6, "start-2-on")
    ('step-6', 'step-4-to-6 start-2-on')
    """
    steps = f"{_STEP}{step}" if first == step else f"{_STEP}{first}-to-{step}"
    return steps if slice_ == WHOLE else f"{steps} {slice_}"


def slice_of(name: str) -> str:
    """The slice of a cell of a step; other names are unchanged.

    >>> slice_of("step-6"), slice_of("step-4-to-6 start-2-on"), slice_of("turn-2")
    ('all', 'start-2-on', 'turn-2')
    """
    if not name.startswith(_STEP):
        return name
    return name.partition(" ")[2] or WHOLE


def step_of(cell: CellVerdict) -> str:
    """The step of a cell of one; "" for another cell."""
    return cell.slice.removeprefix(_STEP).partition(" ")[0] if is_step(cell) else ""


def is_step(cell: CellVerdict) -> bool:
    return cell.slice.startswith(_STEP)


def _over_steps(cell: Cell) -> bool:
    """Whether a cell is an enforced mean, which is plotted over the steps."""
    clause = cell.clause
    return (
        isinstance(cell.kind, Certificate)
        and cell.kind.feed.threshold is None
        and clause.enforced
        and clause.metric == "tv"
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
