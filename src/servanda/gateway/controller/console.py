# The lines of `servanda serve`: the watched cells with their thresholds, and every transition.

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from servanda.contract.model import Clause, Contract
from servanda.gateway.controller.status import CellStatus, ControllerStatus, SliceStatus
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.state import Transition
from servanda.report.format import count
from servanda.theory.divergence.base import DIVERGENCES

_MODES = {
    "observe": "observe: decisions are recorded, no route is changed",
    "enforce": "enforce: decisions about a slice are acted on",
}


def describe(status: ControllerStatus, contract: Contract) -> Iterator[str]:
    """The cells of a contract that are watched, with their thresholds, and those that are not."""
    clauses = {clause.id: clause for clause in contract.statistical}
    cells = [(slice_, cell) for slice_ in status.slices for cell in slice_.cells]
    yield f"{status.name} ({status.contract[:8]}), mode {_MODES[status.mode]}"
    watched = count(len(cells), "cell")
    yield f"watches K = {watched} (a clause on a slice); alarm thresholds are multiplied by K"
    for slice_, cell in cells:
        yield f"  {_cell(slice_, cell, clauses.get(cell.clause))}"
    if status.left_out:
        yield "does not watch"
    for left in status.left_out:
        yield f"  {left.clause} on {left.slice}: {left.why}"


def _cell(slice_: SliceStatus, cell: CellStatus, clause: Clause | None) -> str:
    alarm, back = _evidence(cell.log_price), _evidence(cell.log_leave_price)
    thresholds = f"alarm threshold {alarm}, return threshold {back}"
    does = {"": "nothing", "slice": "the slice", "all": "all traffic"}[cell.diverts]
    return f"{cell.clause} on {slice_.name}: {_promise(cell, clause)}; {thresholds}; diverts {does}"


def _promise(cell: CellStatus, clause: Clause | None) -> str:
    """The limit in the clause's own words; one of a percentile is a share of tokens."""
    if cell.refutes:
        return "tokens sampled from the distribution that infer reports"
    if clause is None or clause.percentile is None or not isinstance(clause.at_most, float):
        return f"a mean of at most {cell.limit:g} {cell.unit}".rstrip()
    metric = DIVERGENCES.get(clause.metric)
    unit = f" {metric.unit}" if metric is not None and metric.unit else ""
    return f"at most {100 * cell.limit:g} % of tokens beyond {clause.at_most:g}{unit}"


def _evidence(log: float) -> str:
    return f"{math.exp(log):,.0f}" if log < 700 else f"exp({log:.0f})"


def transition_line(transition: Transition) -> str:
    """A change of a slice as one line."""
    at = time.strftime("%H:%M:%S", time.localtime(transition.at))
    before, after = (place.split()[0] for place in (transition.before, transition.after))
    moves = (before in AWAY) != (after in AWAY) or "recovering" in (before, after)
    done = " (recorded only, route unchanged)" if moves and not transition.acted else ""
    who = "" if transition.actor == "servanda" else f", by {transition.actor}"
    pages = f"; pages {', '.join(transition.pages)}" if transition.pages else ""
    change = f"{transition.slice}: {transition.before} -> {transition.after}"
    return f"{at} {change}{done}: {transition.reason}{who}{pages}"
