# The report on a promotion: its steps, the cell that decided each, and what to do next.

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from servanda.contract.stages import Leg
from servanda.promotion.advance import judged, route_of
from servanda.promotion.run.history import Evaluation, History
from servanda.promotion.state import CellResult
from servanda.report.cell_text import Tick, shown, shown_interval, shown_limit, size, tick
from servanda.report.format import duration, line
from servanda.report.table import table
from servanda.traces.serialization import to_plain

HEAD = ("stage", "traffic", "state", "groups", "decided by", "measured", "interval", "limit", "n")
_WIDEST = 40  # of a column; a longer name is cut


@dataclass(frozen=True)
class LegRow:
    """One step of a run.

    Args:
        state: held, to come, or the run's status for its current step.
        groups: of the latest evaluation; None without one.
        decided: the cell that decided that evaluation.
        tick: the answer of that evaluation; an error where a person overrode a cell that did not
            hold, violated where the run has ended.
    """

    leg: Leg
    state: str
    groups: int | None
    decided: CellResult | None
    tick: Tick

    @property
    def glyph(self) -> str:
        """Green only on evidence: of a step that was passed, or of a completed run."""
        if self.state == "to come":
            return "·"
        decided = self.tick.outcome == "violated" or self.state.startswith(("held", "completed"))
        return self.tick.glyph if decided else "▶"


def rows(history: History) -> tuple[LegRow, ...]:
    """The steps of a run, with the latest evaluation of each."""
    latest: dict[int, Evaluation] = {}
    at = 0
    for evaluation in history.evaluations:
        latest[at] = evaluation
        at = evaluation.state.leg
    rows = []
    for i, leg in enumerate(history.course):
        evaluation = latest.get(i)
        here = i == history.state.leg
        state = history.state.status.replace("_", " ") if here else "held"
        if i > history.state.leg:
            state = "to come"
        groups = decided = None
        answer = Tick("inconclusive")
        if evaluation is not None:
            overrides = evaluation.state.overrides
            cells = evaluation.finding.cells
            waived = [c for c in cells if any(o.covers(c) for o in overrides)]
            outcome, decided = judged([c for c in cells if c not in waived])
            answer = tick(outcome, decided.n if decided else 0)
            if state in ("held", "completed") and any(c.outcome != "holds" for c in waived):
                answer, state = Tick("error"), f"{state}, overridden"
            if decided is not None and not decided.n:
                decided = None  # no evidence and no decision
            if not evaluation.finding.error:
                groups = evaluation.finding.groups
            elif here:
                state = "not measured"
        if here and history.state.ended:
            answer = Tick("violated")
        rows.append(LegRow(history.leg if here else leg, state, groups, decided, answer))
    return tuple(rows)


def text(history: History, *, now: float) -> str:
    """A promotion for people: a row per step, the status with its reason, and the next move."""
    head, *row_texts = table([HEAD, *map(columns, rows(history))], widest=_WIDEST)
    lines = [f"{history.run}  {line(history.opened['kernels']['infer'])}"]
    lines += [f"  {head}"]
    lines += [f"{row.glyph} {cells}" for row, cells in zip(rows(history), row_texts, strict=True)]
    status = history.state.status.replace("_", " ").upper()
    status += "" if history.state.status == "completed" else f" on {history.leg.name}"
    lines += ["", f"{status}: {history.state.why}"]
    if history.state.ended:  # its row has the traffic that the step would get
        route = route_of(history.course, history.state)
        mirrored = f", {100 * route['mirror']:.3g} % are mirrored to it" if route["mirror"] else ""
        lines += [
            f"  the infer kernel serves {100 * route['share']:.3g} % of the traffic now{mirrored}"
        ]
    lines += [
        f"  overridden until {when(o.expires)} by {o.actor}: {o.clause} on {o.slice} ({o.reason})"
        for o in history.state.overrides
        if o.expires > now
    ]
    lines += [f"  next: {move}" for move in _next(history)]
    return "\n".join(part.rstrip() for part in lines)


def data(history: History, *, now: float) -> dict[str, Any]:
    state = history.state
    return {
        "run": history.run,
        "contract": history.opened["contract"],
        "kernels": history.opened["kernels"],
        "key": to_plain(state.key),
        "status": state.status,
        "stage": history.leg.stage,
        "leg": history.leg.name,
        "why": state.why,
        "since": state.since,
        "valid_until": state.valid_until,
        "route": route_of(history.course, state),
        "overrides": [to_plain(o) for o in state.overrides if o.expires > now],
        "legs": [
            {
                "leg": row.leg.name,
                "state": row.state,
                "groups": row.groups,
                "first": row.leg.first,
                "last": row.leg.last,
                "decided": to_plain(row.decided) if row.decided else None,
            }
            for row in rows(history)
        ],
        "entry": history.seq,
    }


def cell_text(cell: CellResult) -> str:
    """A cell with its interval and its n, in one line.

    >>> cell_text(CellResult("tv", "all", "holds", 0.004, 0.003, 0.005, 0.02, 1200, "tokens"))
    'tv on all 0.004 [0.003, 0.005], limit 0.02, n 1,200 tokens'
    """
    measured = " ".join(part for part in (shown(cell.value, cell.share), _interval(cell)) if part)
    limit = f"limit {_limit(cell)}" if cell.limit is not None else ""
    n = f"n {size(cell.n, cell.units)}"
    head = f"{cell.name} {measured}".rstrip()
    return ", ".join(part for part in (head, limit, n, cell.note) if part)


def when(at: float) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def columns(row: LegRow) -> tuple[str, ...]:
    leg, cell = row.leg, row.decided
    sizes = f"{leg.first:,} to {leg.last:,}"
    groups = sizes if row.groups is None else f"{row.groups:,} of {sizes}"
    numbers = ("", "", "", "", "")
    if cell is not None:
        n = size(cell.n, cell.units)
        numbers = (line(cell.name), shown(cell.value, cell.share), _interval(cell), _limit(cell), n)
    return (leg.name, leg.traffic, row.state, groups, *numbers)


def _interval(cell: CellResult) -> str:
    return shown_interval(cell.low, cell.high, cell.share)


def _limit(cell: CellResult) -> str:
    limit = shown_limit(cell.limit, cell.share)
    return f"at least {limit}" if limit and cell.at_least else limit


def _next(history: History) -> list[str]:
    run, leg, status = history.run, history.leg, history.state.status
    if history.state.errors and not history.state.ended:
        once = "repair the failure, then run servanda promote again"
        halted = [f"servanda promotion rollback {run} --reason TEXT"] if status == "halted" else []
        return [once, *halted]
    if status == "awaiting_approval":
        return [f"servanda promotion approve {run} --reason TEXT"]
    if status == "running":
        left = history.state.since + leg.dwell_s - history.state.seen
        wait = f" in {duration(round(left))}" if left > 0 else ""
        return [f"run servanda promote again{wait}"]
    if status == "awaiting_evidence":
        source = "wait for traffic, then " if leg.live else ""
        return [f"{source}run servanda promote again, or use --every 30s"]
    if status == "halted":
        return [
            f"servanda promotion override {run} --clause ID --slice NAME --ttl 24h --reason TEXT",
            f"servanda promotion rollback {run} --reason TEXT",
        ]
    if status in ("rolled_back", "superseded"):
        return ["promote a repaired build: servanda promote --fresh"]
    if leg.stage != "full":
        return [f"nothing: the promotion of this contract ends at {leg.stage}"]
    return ["servanda promote --every 5m keeps evaluating, for the build can still fail"]
