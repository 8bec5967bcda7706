# The entries that a controller writes to a ledger, and the check that they are consistent.
#
# A run of a ledger is named after the contract.  In it each controller's store has its own name
# ("leader") and numbers its entries from 1 ("o").  So no entry is written twice, a lost store
# begins a new history, and two controllers do not interfere.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from servanda._version import __version__
from servanda.contract.identity import digest_of
from servanda.errors import EvidenceError, Problem
from servanda.gateway.routing.evidence_price import log_prices
from servanda.gateway.routing.model import AWAY, STATUSES
from servanda.gateway.routing.state import Rules, SliceState, Transition
from servanda.promotion.ledger.entry import Entry, LedgerError
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.run.history import DELIVERED, GATEWAY
from servanda.promotion.run.report import when
from servanda.promotion.state import Effect
from servanda.report.format import count, line, place
from servanda.traces.serialization import from_plain, to_plain

ROUTED = "routed"
_HAIR = 1e-9  # nats: rounding by JSON
# status -> statuses that may follow, by evidence or by the clock
_MOVES: Mapping[str, tuple[str, ...]] = {
    "active": ("active", "suspect", "quarantined"),
    "suspect": ("suspect", "active", "quarantined"),
    "quarantined": ("quarantined", "probation"),
    "probation": ("probation", "quarantined", "recovering"),
    "recovering": ("recovering", "quarantined", "active"),
}
_PIN = ", pinned to "
_LONGEST = 80  # characters of a name


def run_of(contract: str) -> str:
    """The name of the run that the controllers of a contract write to."""
    return f"{contract}-gateway"


def gateway_entry(
    rules: Rules,
    stands: Mapping[str, str],
    *,
    transitions: int,
    leader: str,
    o: int,
    why: str,
    fingerprints: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The body of an entry that records the contract and slices in effect from now on.

    Args:
        stands: status of each slice; transitions: number of transitions before.
        o: number of the entry within its controller; why: reason of the entry.
    """
    policy, contract = rules.policy, rules.contract
    return {
        "leader": leader,
        "o": o,
        "text": f"{policy.mode}: {rules.cells} cells on {len(stands)} slices; {why}",
        "gateway": {"name": contract.metadata.name, "digest": contract.digest},
        "mode": policy.mode,
        "fingerprints": to_plain(fingerprints),
        "cells": rules.cells,
        "watched": [cell.name for cell in rules.watched],
        "prices": dict(zip(("enter", "alarm", "leave"), log_prices(rules), strict=True)),
        "keys": policy.keys,
        "slices": dict(stands),
        "transitions": transitions,
        "servanda": __version__,
    }


def routed_entry(
    transition: Transition, before: SliceState | None, *, leader: str, o: int, run: str
) -> dict[str, Any]:
    """The body of an entry that records a transition of a slice with its evidence.

    Args:
        before: the slice with the evidence that was evaluated.
    """
    plain = to_plain(transition)
    moved = plain["before"] != plain["after"]
    arrow = f"{plain['before']} → {plain['after']}" if moved else plain["after"]
    would = "" if transition.acted or not moved else " (observed)"
    return {
        **plain,
        "leader": leader,
        "o": o,
        "text": f"{transition.slice}: {arrow}{would}: {transition.reason}",
        "evidence": digest_of(to_plain(before.tracks)) if before is not None else "",
        "effects": to_plain(_effects(transition, leader, run)),
        "servanda": __version__,
    }


def _effects(transition: Transition, leader: str, run: str) -> tuple[Effect, ...]:
    """The notifications: of a changed route to all, of pages to the people that the rules name."""
    key = f"{run}:{leader[:8]}:{transition.number}"
    body = {"run": run, "status": transition.after, "from": transition.before}
    body |= {"slice": transition.slice, "why": f"{transition.slice}: {transition.reason}"}
    names = ("cell", "value", "limit", "log_evidence", "log_price", "n", "keys")
    values = {name: getattr(transition, name) for name in names}
    decided = to_plain(values) if transition.cell is not None else None
    body |= {"at": transition.at, "decided": decided, "leg": "gateway"}
    notices = [Effect("notify", f"{key}:notify", body)] if transition.acted else []
    pages = [Effect("page", f"{key}:page:{to}", {**body, "to": to}) for to in transition.pages]
    return (*notices, *pages)


@dataclass
class _StoreHistory:
    """The state derived from the entries of one controller so far."""

    o: int = 0
    number: int = 0
    keys: int = 0
    slices: dict[str, str] = field(default_factory=dict)


def gateway_runs(ledger: Ledger) -> Iterator[str]:
    """The runs of controllers, oldest first."""
    for run in ledger.runs():
        first = next(iter(ledger.entries(run)), None)
        if first is not None and first.kind == GATEWAY:
            yield run


def disagreements(ledger: Ledger) -> tuple[Problem, ...]:
    """Entries of controllers that are inconsistent with the entries before them."""
    return tuple(p for run in gateway_runs(ledger) for p in run_problems(ledger.entries(run)))


def run_problems(entries: Iterable[Entry]) -> Iterator[Problem]:
    """The problems of the entries of one run, each with its place."""
    leaders: dict[str, _StoreHistory] = {}
    for entry in entries:
        if entry.kind == DELIVERED:
            continue
        try:
            for what in _next(leaders, entry):
                yield _problem(entry, what)
        except (EvidenceError, KeyError, TypeError, ValueError, AttributeError) as error:
            message = str(error).split("\n", 1)[0]
            yield _problem(entry, f"cannot be replayed: {message or type(error).__name__}")


def _next(leaders: dict[str, _StoreHistory], entry: Entry) -> Iterator[str]:
    body = entry.body
    name, o = str(body["leader"]), body["o"]
    history = leaders.setdefault(name, _StoreHistory())
    if o != history.o + 1:
        yield f"is number {o} of its leader, and follows {history.o}"
    history.o = o
    if entry.kind == GATEWAY:
        yield from _opened(history, body)
    elif entry.kind == ROUTED:
        yield from _routed(history, from_plain(Transition, body))
    else:
        yield f"is of an unknown kind, {entry.kind!r}"


def _opened(history: _StoreHistory, body: Mapping[str, Any]) -> Iterator[str]:
    if body["transitions"] != history.number:
        yield f"says {body['transitions']} transitions came before, and {history.number} did"
    for name, stands in body["slices"].items():
        if name in history.slices and history.slices[name] != stands:
            yield f"says {name} was {stands}, and it was {history.slices[name]}"
        if name not in history.slices and history.o > 1 and _status(stands) != "active":
            yield f"says {name} is new and {stands}"
    history.number, history.keys = body["transitions"], body["keys"]
    history.slices = dict(body["slices"])


def _routed(history: _StoreHistory, t: Transition) -> Iterator[str]:
    if not history.slices:
        yield "comes before anything was opened"
    if t.number != history.number + 1:
        yield f"is transition {t.number}, and follows {history.number}"
    history.number = t.number
    stood = history.slices.get(t.slice)
    if stood is None:
        yield f"moves {t.slice}, which is no slice"
    elif stood != t.before:
        yield f"says {t.slice} was {t.before}, and it was {stood}"
    history.slices[t.slice] = t.after
    before, after = _status(t.before), _status(t.after)
    if after not in STATUSES or before not in STATUSES:
        yield f"says {t.slice} went from {t.before} to {t.after}, and there is no such status"
    elif after not in _MOVES[before] and t.slice != "all":
        # the whole traffic may be diverted from any status
        yield f"says {t.slice} went from {t.before} to {t.after} in one step"
    yield from _evidence_problems(history, t, before, after)


def _evidence_problems(
    history: _StoreHistory, t: Transition, before: str, after: str
) -> Iterator[str]:
    """Whether the e-value of an entry reaches the threshold of its change."""
    if before == after or after not in ("quarantined", "recovering"):
        return
    if t.cell is None:
        if after == "quarantined":
            yield f"says {t.slice} was diverted, and no cell decided it"
        return
    if not t.log_evidence >= t.log_price - _HAIR:
        yield (
            f"says {t.slice} went to {after} at a log e-value of {t.log_evidence:.3g}, and the "
            f"threshold was {t.log_price:.3g}"
        )
    if t.n < 1:
        yield f"says {t.slice} went to {after} on no request"
    own = t.cell.endswith(f" on {t.slice}")
    if after == "quarantined" and before not in AWAY and t.acted and own and t.keys < history.keys:
        yield f"says {t.slice} was diverted on {t.keys} users, and {history.keys} are needed"


def _status(text: str) -> str:
    """The status without the pin."""
    return text.partition(",")[0]


def _problem(entry: Entry, what: str) -> Problem:
    wrote = entry.body.get("servanda", "of no version")
    return Problem(
        f"entry {entry.seq} (number {entry.n} of run {entry.run}) {what}",
        None,
        "the ledger was edited, or another version decides otherwise: it was written by "
        f"servanda {wrote}, and this is {__version__}",
    )


# The status of a gateway's slices, read from the ledger alone.


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
    parts.append(f"{slices} not diverted" if rest else "")
    text = "; ".join(filter(None, parts)) or "no slice is known"
    return f"{line(status.run, _LONGEST)} ({status.mode}): {text}; last entry {when(status.at)}"
