# The decision that diverted a slice: its value is shown for as long as the slice is diverted, for
# the evidence restarts at the diversion.

from __future__ import annotations

import math

from servanda.gateway.controller.status import CellStatus, ControllerStatus, SliceStatus
from servanda.gateway.controller.web import format
from servanda.gateway.controller.web.phrases import returns, worst
from servanda.gateway.routing.state import Transition
from servanda.report.format import count, line

# status -> the requests that the current evidence covers
_FRESH = {
    "quarantined": "since diversion",
    "probation": "in the re-test",
    "recovering": "since its return began",
}


def trigger(slice_: SliceStatus, status: ControllerStatus) -> Transition | None:
    """The decision that diverted a slice; None where it is not diverted, or no longer known."""
    if not returns(slice_):
        return None
    changes = (t for t in reversed(status.transitions) if t.slice == slice_.name)
    return next((t for t in changes if t.after.startswith("quarantined") and t.cell), None)


def value(t: Transition) -> str:
    """The value that triggered the diversion, before `versus`."""
    return format.measured(abs(t.value) if math.isnan(t.limit) else t.value)


def versus(t: Transition) -> str:
    """The words after the value that triggered the diversion."""
    if math.isnan(t.limit):
        return f" nats a token {'likelier' if t.value >= 0 else 'less likely'} than reported"
    return f", limit {format.figure(t.limit)}"


def source(t: Transition, now: float) -> str:
    """The cell that triggered the diversion, when, and on how much evidence."""
    who = f"{count(t.n, 'request')}, {count(t.keys, 'user')}"
    return f"{line(t.cell or '', 120)}, at the diversion {format.clock(t.at, now)} ({who})"


def cell_of(slice_: SliceStatus, cause: Transition | None) -> CellStatus | None:
    """The cell that triggered the diversion, else the one nearest to its alarm threshold."""
    named = (c for c in slice_.cells if cause and cause.cell == f"{c.clause} on {slice_.name}")
    return next(named, worst(slice_))


def fresh(slice_: SliceStatus, cell: CellStatus) -> str:
    """The requests that the current value of a cell covers; "" where nothing restarted it.

    >>> fresh(SliceStatus("code", "quarantined", 0.0), CellStatus("tv", 0.1, n=3))
    'since diversion, n = 3'
    """
    since = _FRESH.get(slice_.status, "")
    return f"{since}, n = {cell.n:,}" if since else ""
