# The page of a controller: its status as tables.  It is served whole, and as a fragment for the
# script that updates it; without the script the browser reloads the page.

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from servanda.gateway.controller.status import CellStatus, ControllerStatus, SliceStatus
from servanda.gateway.controller.web import format, summary
from servanda.gateway.http.api_keys import Holder
from servanda.gateway.routing.state import Transition
from servanda.report.format import count, duration, line, percent, place
from servanda.report.html import environment

_MOVES = 12  # latest decisions that are shown
_PACKAGE = "servanda.gateway.controller.web"


@dataclass(frozen=True)
class Asset:
    """A file that the page loads; its address changes with its content."""

    data: bytes
    media_type: str

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:12]


ASSETS: Mapping[str, Asset] = {
    name: Asset((resources.files(_PACKAGE) / "assets" / name).read_bytes(), media_type)
    for name, media_type in (("page.css", "text/css"), ("page.js", "text/javascript"))
}


class Table(NamedTuple):
    """A table of texts; the first column names the row, and "" is printed as a dash.

    Args:
        numbers: the columns that are aligned to the right.
    """

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: range = range(0)


def page(status: ControllerStatus, holder: Holder) -> str:
    """The whole page.

    Args:
        holder: the reader: pins are offered to those who may pin.
    """
    return _template("page.html").render(**view(status, holder))


def fragment(status: ControllerStatus, holder: Holder) -> str:
    """The part of the page that changes."""
    return _template("fragment.html").render(**view(status, holder))


@lru_cache(maxsize=2)
def _template(name: str) -> Any:
    return environment(_PACKAGE).get_template(name)


def view(status: ControllerStatus, holder: Holder) -> dict[str, Any]:
    """Everything that the page shows, by the names that its templates use."""
    digest = status.contract.removeprefix("sha256:")[:8]
    return {
        "s": status,
        "head": summary.headline(status),
        "basis": summary.basis(status),
        "rows": [_row(slice_, status) for slice_ in summary.ordered(status.slices)],
        "tables": [_evidence(status), _decisions(status), _traffic(status)],
        "problems": [summary.problem(text, 400) for text in status.problems],
        "name": line(status.name, 80),
        "contract": " · ".join(filter(None, (digest, line(status.run, 40), line(status.leg, 40)))),
        "holder": holder,
        "may_pin": holder.may("pin"),
        "now": format.stamp(status.now),
        "ledger": line(status.ledger_where, 120),
        "assets": ASSETS,
    }


def _row(slice_: SliceStatus, status: ControllerStatus) -> dict[str, Any]:
    cell = summary.worst(slice_)
    return {
        "slice": slice_,
        "name": place(slice_.name, 400),
        "share": percent(slice_.share),
        "state": summary.state(slice_),
        "since": duration(status.now - slice_.since) if slice_.since else "",
        "notes": summary.notes(slice_, status.now),
        "served_by": summary.served_by(slice_, status),
        "would_be": summary.would_be(slice_, status),
        "replies": _replies(slice_.served),
        "cell": cell,
        "value": format.measured(cell.value) if cell is not None else "",
        "limit": summary.limit(cell) if cell is not None else "",
        "clause": line(cell.clause, 60) if cell is not None else "",
        "alarm": _alarm(cell) if cell is not None and slice_.scored else "",
        "scored": f"{slice_.scored:,}",
        "users": count(slice_.keys, "user"),
    }


def _replies(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{line(pool, 20)} {n:,}" for pool, n in sorted(counts.items()) if n > 0)


def _alarm(cell: CellStatus) -> str:
    return summary.of_threshold(cell.nearness, "threshold")


def _evidence(status: ControllerStatus) -> Table:
    """Every cell with its numbers."""
    heads = ("slice", "clause", "value", "interval", "limit", "noise floor", "e-value")
    heads = (*heads, "alarm threshold", "return e-value", "return threshold", "requests")
    rows = [
        (place(slice_.name, 60), *_numbers(cell, summary.returns(slice_)))
        for slice_ in summary.ordered(status.slices)
        for cell in slice_.cells
    ]
    return Table("Evidence", heads, rows, range(2, len(heads)))


def _numbers(cell: CellStatus, away: bool) -> Iterator[str]:
    """The columns of a cell; those of the return test where its slice is or was diverted."""
    unit = line(cell.unit, 20)
    yield line(cell.clause, 60)
    yield f"{format.measured(cell.value)} {unit}".rstrip()
    yield " to ".join(map(format.measured, cell.interval)) if cell.interval else ""
    yield summary.limit(cell)
    yield format.measured(cell.floor) if cell.floor is not None else ""
    yield from map(format.evidence, summary.nearest(cell))
    back = (cell.log_below, cell.log_leave_price)
    yield from map(format.evidence, back) if away else ("", "")
    yield f"{cell.n:,}"


def _decisions(status: ControllerStatus) -> Table:
    """The latest decisions, the latest first."""
    latest = status.transitions[-_MOVES:]
    more = f", {len(latest)} of {status.moves:,}" if status.moves > len(latest) else ""
    heads = ("time", "slice", "decision", "reason", "value", "limit", "e-value")
    heads = (*heads, "alarm threshold", "requests", "users")
    rows = [_decision(t, status.now) for t in reversed(latest)]
    return Table(f"Last decisions (UTC{more})", heads, rows, range(4, len(heads)))


def _decision(t: Transition, now: float) -> tuple[str, ...]:
    before, after = line(t.before, 40), line(t.after, 40)
    still = t.before == "quarantined" and t.after == "probation"  # the route stays as it is
    kept = t.acted or still or after.partition(",")[0] in ("active", "suspect")
    change = f"{before} → {'' if kept else 'would be '}{after}" if before != after else after
    who = f"{line(t.actor, 40)}: " if t.actor != "servanda" else ""
    known = t.cell is not None and t.value == t.value
    numbers = [
        format.measured(t.value) if known else "",
        format.figure(t.limit) if known and t.limit == t.limit else "",
        *(format.evidence(e) if e == e else "" for e in (t.log_evidence, t.log_price)),
        *(f"{n:,}" if t.n else "" for n in (t.n, t.keys)),
    ]
    reason = who + line(t.reason, 300)
    return (format.clock(t.at, now), place(t.slice, 60), change, reason, *numbers)


def _traffic(status: ControllerStatus) -> Table:
    """The replies and the load of each pool."""
    totals: Counter[str] = Counter()  # requests by the pool whose reply they got
    for key, n in summary.counted(status, "answers").items():
        totals[key.rpartition("\t")[2]] += n
    heads = ("pool", "requests", "in flight", "peak", "capacity", "room", "condition")
    rows = []
    for name, pool in status.pools.items():
        condition = ["! circuit breaker open"] if pool.open else []
        condition += [summary.replicas(pool)] if pool.replicas else []
        condition += filter(None, [summary.failovers(status)] if name == "stable" else [])
        numbers = (totals[name], pool.in_flight, pool.peak, pool.most, pool.headroom)
        texts = ("" if n is None else f"{n:,}" for n in numbers)
        rows.append((name, *texts, " · ".join(condition)))
    return Table("Traffic", heads, rows, range(1, 6))
