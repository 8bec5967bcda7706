# What `servanda serve` prints: what is watched and at which prices, and every transition.

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from servanda.contract.model import Clause, Contract
from servanda.gateway.controller.status import CellStanding, SliceStanding, Standing
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.state import Transition
from servanda.theory.divergence.base import DIVERGENCES

_MODES = {
    "observe": "observe: nothing is diverted; each decision says what would be",
    "enforce": "enforce: what is decided of a slice is done",
}


def story(standing: Standing, contract: Contract) -> Iterator[str]:
    """What a leader watches of a contract, at which prices, and what it does not."""
    clauses = {clause.id: clause for clause in contract.statistical}
    cells = [(one, cell) for one in standing.slices for cell in one.cells]
    yield f"{standing.name} ({standing.contract[:8]}), mode {_MODES[standing.mode]}"
    yield f"watches K = {len(cells)}, so that each needs K times the evidence that one would"
    for one, cell in cells:
        yield f"  {_cell(one, cell, clauses.get(cell.clause))}"
    if standing.left_out:
        yield "does not watch"
    for left in standing.left_out:
        yield f"  {left.clause} on {left.slice}: {left.why}"


def _cell(one: SliceStanding, cell: CellStanding, clause: Clause | None) -> str:
    prices = f"out at {_evidence(cell.log_price)}, back at {_evidence(cell.log_leave_price)}"
    does = {"": "nothing", "slice": "the slice", "all": "all traffic"}[cell.diverts]
    return f"{cell.clause} on {one.name}: {_promise(cell, clause)}; {prices}; diverts {does}"


def _promise(cell: CellStanding, clause: Clause | None) -> str:
    """The limit in the clause's own words; one of a percentile is a share of tokens."""
    if cell.refutes:
        return "tokens drawn from the distribution that infer reports"
    if clause is None or clause.percentile is None or not isinstance(clause.at_most, float):
        return f"a mean of at most {cell.limit:g} {cell.unit}".rstrip()
    metric = DIVERGENCES.get(clause.metric)
    unit = f" {metric.unit}" if metric is not None and metric.unit else ""
    return f"at most {100 * cell.limit:g} % of tokens beyond {clause.at_most:g}{unit}"


def _evidence(log: float) -> str:
    return f"{math.exp(log):,.0f}" if log < 700 else f"exp({log:.0f})"


def transition(one: Transition) -> str:
    """A change of a slice, in a line."""
    at = time.strftime("%H:%M:%S", time.localtime(one.at))
    before, after = (place.split()[0] for place in (one.before, one.after))
    moves = (before in AWAY) != (after in AWAY) or "recovering" in (before, after)
    done = " (only noted: nothing is moved)" if moves and not one.acted else ""
    who = "" if one.actor == "servanda" else f", by {one.actor}"
    pages = f"; pages {', '.join(one.pages)}" if one.pages else ""
    return f"{at} {one.slice}: {one.before} -> {one.after}{done}: {one.reason}{who}{pages}"
