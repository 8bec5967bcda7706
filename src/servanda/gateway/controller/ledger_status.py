# The status of a gateway's slices, read from the ledger alone.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from servanda.gateway.controller.ledger_history import ROUTED, gateway_runs
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.state import Transition
from servanda.promotion.ledger.entry import Entry, LedgerError
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.run.history import GATEWAY
from servanda.promotion.run.report import when
from servanda.report.format import count, line, place
from servanda.traces.serialization import from_plain

_PIN = ", pinned to "
_LONGEST = 80  # characters of a name


@dataclass(frozen=True)
class LedgerSlice:
    """The status of a slice, such as "quarantined" or "active, pinned to stable".

    Args:
        since: unix seconds; acted: whether the decision is acted on, not only reported.
    """

    stands: str = "active"
    since: float = 0.0
    acted: bool = False

    @property
    def away(self) -> bool:
        """Whether stable serves it, or would if decisions were acted on."""
        status, _, pin = self.stands.partition(_PIN)
        return pin == "stable" or (status in AWAY and pin != "infer")


@dataclass(frozen=True)
class LedgerStatus:
    """The status of a gateway's run after its latest entries.

    Args:
        at: time of the latest entry, unix seconds.
    """

    run: str
    mode: str = ""
    at: float = 0.0
    slices: Mapping[str, LedgerSlice] = field(default_factory=dict)


def ledger_statuses(ledger: Ledger) -> tuple[LedgerStatus, ...]:
    """The runs of gateways, oldest first.

    Raises:
        LedgerError: an entry was not written by a controller.
    """
    return tuple(_status_of(run, ledger.entries(run)) for run in gateway_runs(ledger))


def _status_of(run: str, entries: Iterable[Entry]) -> LedgerStatus:
    status = LedgerStatus(run)
    for entry in entries:
        try:
            status = _with(status, entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(
                f"entry {entry.seq} of run {run} cannot be replayed: {error}",
                hint="`servanda promotion ledger verify` lists the problems",
            ) from None
    return status


def _with(status: LedgerStatus, entry: Entry) -> LedgerStatus:
    body = entry.body
    if entry.kind == GATEWAY:
        known = status.slices
        acts = body["mode"] == "enforce"
        slices = {
            name: known[name]
            if name in known and known[name].stands == stands
            else LedgerSlice(stands, entry.at, acts)
            for name, stands in body["slices"].items()
        }
        return LedgerStatus(status.run, body["mode"], entry.at, slices)
    if entry.kind != ROUTED:
        return status
    moved = from_plain(Transition, body)
    stood = status.slices.get(moved.slice, LedgerSlice())
    same = stood.stands == moved.after
    stand = LedgerSlice(moved.after, stood.since if same else moved.at, moved.acted)
    return replace(status, at=entry.at, slices={**status.slices, moved.slice: stand})


def render(status: LedgerStatus) -> str:
    """One line: which slices are diverted and since when, as of the last entry."""
    away = {name: ledger_slice for name, ledger_slice in status.slices.items() if ledger_slice.away}
    parts = [
        f"{place(name, _LONGEST)} {'is' if ledger_slice.acted else 'would be'} served by stable "
        f"since {when(ledger_slice.since)} ({ledger_slice.stands})"
        for name, ledger_slice in away.items()
    ]
    rest = len(status.slices) - len(away)
    slices = count(rest, "other slice" if away else "slice")
    parts.append(f"infer serves {slices}" if rest else "")
    text = "; ".join(filter(None, parts)) or "no slice is known"
    return f"{line(status.run, _LONGEST)} ({status.mode}): {text}; last entry {when(status.at)}"
