# Recalling: where the slices of a gateway stand by what a ledger holds, and nobody else is asked.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from servanda.gateway.controller.ledger_history import ROUTED, gateway_runs
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.state import Transition
from servanda.promotion.ledger.entry import Entry, Ledger, LedgerError
from servanda.promotion.run.history import GATEWAY
from servanda.promotion.run.report import when
from servanda.report.format import line, place
from servanda.traces.serialization import from_plain

_PIN = ", pinned to "
_LONGEST = 80  # characters of a name


@dataclass(frozen=True)
class Stand:
    """Where a slice stands, such as "quarantined" or "active, pinned to stable".

    Args:
        since: unix seconds; acted: whether it is done, and not only told.
    """

    stands: str = "active"
    since: float = 0.0
    acted: bool = False

    @property
    def away(self) -> bool:
        """Whether stable serves it, or would."""
        status, _, pin = self.stands.partition(_PIN)
        return pin == "stable" or (status in AWAY and pin != "infer")


@dataclass(frozen=True)
class Recalled:
    """A gateway's run, as its latest entries leave it.

    Args:
        at: of the latest entry, unix seconds.
    """

    run: str
    mode: str = ""
    at: float = 0.0
    slices: Mapping[str, Stand] = field(default_factory=dict)


def recalled(ledger: Ledger) -> tuple[Recalled, ...]:
    """The runs of gateways, in the order in which they began.

    Raises:
        LedgerError: an entry is none that a leader writes.
    """
    return tuple(_recalled(run, ledger.entries(run)) for run in gateway_runs(ledger))


def _recalled(run: str, entries: Iterable[Entry]) -> Recalled:
    found = Recalled(run)
    for entry in entries:
        try:
            found = _with(found, entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(
                f"entry {entry.seq} of run {run} cannot be told again: {error}",
                hint="`servanda promotion ledger verify` says what is wrong with it",
            ) from None
    return found


def _with(found: Recalled, entry: Entry) -> Recalled:
    body = entry.body
    if entry.kind == GATEWAY:
        known = found.slices
        acts = body["mode"] == "enforce"
        slices = {
            name: known[name]
            if name in known and known[name].stands == stands
            else Stand(stands, entry.at, acts)
            for name, stands in body["slices"].items()
        }
        return Recalled(found.run, body["mode"], entry.at, slices)
    if entry.kind != ROUTED:
        return found
    moved = from_plain(Transition, body)
    stood = found.slices.get(moved.slice, Stand())
    same = stood.stands == moved.after
    stand = Stand(moved.after, stood.since if same else moved.at, moved.acted)
    return replace(found, at=entry.at, slices={**found.slices, moved.slice: stand})


def text(found: Recalled) -> str:
    """One line: which slices are away and since when, as of the last entry."""
    away = {name: one for name, one in found.slices.items() if one.away}
    parts = [
        f"{place(name, _LONGEST)} {'is' if one.acted else 'would be'} served by stable "
        f"since {when(one.since)} ({one.stands})"
        for name, one in away.items()
    ]
    rest = len(found.slices) - len(away)
    slices = f"{rest} {'other ' if away else ''}slice{'s' if rest != 1 else ''}"
    parts.append(f"infer serves {slices}" if rest else "")
    told = "; ".join(filter(None, parts)) or "no slice is known"
    return f"{line(found.run, _LONGEST)} ({found.mode}): {told}; last entry {when(found.at)}"
