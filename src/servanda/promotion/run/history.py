# The history of a promotion: ledger entries, replayed by the functions that made them.
#
# No decision is read back as a flag: an entry keeps the finding, or the person's action, and the
# state is derived.  The state that an entry states is compared with the derived one: a ledger in
# which the two differ was not written by Servanda.  It is appended to by events with their
# consequences.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from servanda._version import __version__
from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Contract
from servanda.contract.stages import Leg
from servanda.errors import EvidenceError, Problem
from servanda.promotion.advance import Move, advance, approve, begin, override, roll_back
from servanda.promotion.api import beginning_of, run_name
from servanda.promotion.ledger.entry import Entry, LedgerError, Record
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.state import LegFinding, Override, State, leg_of
from servanda.traces.serialization import from_plain, to_plain

DELIVERED = "told"  # a notification was delivered: it changes nothing
GATEWAY = "gateway-opened"  # first entries of runs other than promotions
_TEXTS = {"why", "asked"}  # parts of a state that are texts for people
_ROUTED = ("share", "mirror", "sample", "status", "leg", "to")  # fields of an effect for programs


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a step, and the state after it."""

    at: float
    leg: Leg
    finding: LegFinding
    state: State


@dataclass(frozen=True)
class History:
    """A promotion, derived from its entries.

    Args:
        opened: the body of the first entry: contract, kernels, fingerprints.
        last: number of the latest entry; what is appended comes after it.
        seq: of the latest entry in the whole ledger.
    """

    run: str
    opened: Mapping[str, Any]
    course: tuple[Leg, ...]
    state: State
    evaluations: tuple[Evaluation, ...] = ()
    last: int = 0
    seq: int = 0

    @property
    def leg(self) -> Leg:
        return leg_of(self.course, self.state)

    def reached(self, stage: str) -> bool:
        """Whether the run is at a stage or beyond; false for a halted or ended run."""
        if self.state.ended or self.state.status == "halted":
            return False
        return stage in [leg.stage for leg in self.course[: self.state.leg + 1]]


def history_of(ledger: Ledger, run: str) -> History | None:
    """A run's history; None if the ledger has no such promotion.

    Raises:
        LedgerError: an entry does not follow from those before it, or cannot be read.
    """
    entries = ledger.entries(run)
    first = next(entries, None)
    if first is None or first.kind == GATEWAY:
        return None
    return replayed(itertools.chain([first], entries))


def refreshed(ledger: Ledger, history: History) -> History:
    """The history with later entries."""
    return replayed(ledger.entries(history.run, since=history.seq), history)


def histories(ledger: Ledger, *, beginning: str = "") -> Iterator[History]:
    """The runs whose names have a prefix, oldest first."""
    for run in ledger.runs():
        history = history_of(ledger, run) if run.startswith(beginning) else None
        if history is not None:
            yield history


def histories_of(ledger: Ledger, contract: str) -> tuple[History, ...]:
    """The runs of all versions of a contract, by its name; other runs are not read."""
    started = histories(ledger, beginning=beginning_of(contract))
    return tuple(history for history in started if history.opened["contract"]["name"] == contract)


def disagreements(ledger: Ledger) -> tuple[Problem, ...]:
    """Runs of which an entry does not follow from those before it."""
    problems: list[Problem] = []
    for run in ledger.runs():
        try:
            history_of(ledger, run)
        except LedgerError as error:
            problems += error.problems
    return tuple(problems)


def replayed(entries: Iterable[Entry], history: History | None = None) -> History:
    """The history of one run's entries, in order.

    Args:
        history: the history before them; None: they are all entries.

    Raises:
        LedgerError: an entry does not follow from those before it, or cannot be read.
    """
    evaluations = [*history.evaluations] if history is not None else []
    for entry in entries:
        try:
            history = _next(history, entry, evaluations)
        except (EvidenceError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error).split("\n", 1)[0]
            raise _refused(entry, f"cannot be replayed: {reason or type(error).__name__}") from None
    if history is None:
        raise LedgerError("a promotion without entries has no history")
    return replace(history, evaluations=tuple(evaluations))


def outcome_body(moved: Move) -> dict[str, Any]:
    """The body of an entry: the state and the notifications."""
    state, effects = moved
    body = {"why": state.why, "state": to_plain(state), "effects": to_plain(effects)}
    del body["state"]["key"]
    return {**body, "servanda": __version__}


def _next(history: History | None, entry: Entry, evaluations: list[Evaluation]) -> History:
    """The history after an entry, except its evaluations, which are appended."""
    body = entry.body
    if history is None:
        if entry.kind != "opened":
            raise _refused(entry, f"is the first of its run and of kind {entry.kind!r}")
        course = tuple(from_plain(Leg, leg) for leg in body["course"])
        key = from_plain(EvidenceKey, body["key"])
        moved = begin(entry.run, key, course, now=entry.at)
        _compare(entry, moved)
        return History(entry.run, body, course, moved[0], last=entry.n, seq=entry.seq)
    if entry.kind == DELIVERED:
        return replace(history, last=entry.n, seq=entry.seq)
    finding = from_plain(LegFinding, body["finding"]) if entry.kind == "looked" else None
    moved = _again(history, entry, finding)
    _compare(entry, moved)
    if finding is not None:
        evaluations.append(Evaluation(entry.at, history.leg, finding, moved[0]))
    return replace(history, state=moved[0], last=entry.n, seq=entry.seq)


def _again(history: History, entry: Entry, finding: LegFinding | None) -> Move:
    body, course, state = entry.body, history.course, history.state
    if finding is not None:
        return advance(course, state, finding, now=entry.at)
    signed = {"actor": entry.actor, "now": entry.at}
    if entry.kind == "approved":
        return approve(course, state, reason=body["reason"], **signed)
    if entry.kind == "rolled_back":
        return roll_back(course, state, reason=body["reason"], **signed)
    if entry.kind == "overrode":
        return override(course, state, from_plain(Override, body["override"]), now=entry.at)
    raise _refused(entry, f"has an unknown kind, {entry.kind!r}")


def _compare(entry: Entry, moved: Move) -> None:
    """Refuse an entry whose state or effects do not follow from the entries before it.

    The reasons are sentences for people, and their words may change: the hashes keep those.  Of an
    entry by another version only the decision counts.
    """
    written, follows = _without_reasons(entry.body), _without_reasons(outcome_body(moved))
    if written.get("servanda") != __version__:
        written, follows = _decided(written, follows), _decided(follows, written)
    names = [name for name in follows if written.get(name) != follows[name]]
    if names:
        raise _refused(
            entry, f"has a {' and '.join(names)} that the entries before it do not lead to"
        )


def _without_reasons(body: Mapping[str, Any]) -> dict[str, Any]:
    effects = [
        {**effect, "body": {**effect["body"], "why": ""}} for effect in body.get("effects", ())
    ]
    return {**body, "why": "", "state": {**body["state"], "why": ""}, "effects": effects}


def _decided(body: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The decision of an entry without texts, restricted to fields that both have."""
    known = {*other["state"]} - _TEXTS
    state = {name: value for name, value in body["state"].items() if name in known}
    effects = [
        (effect["kind"], effect["key"], *(effect["body"].get(name) for name in _ROUTED))
        for effect in body["effects"]
    ]
    return {"state": state, "effects": effects}


def _refused(entry: Entry, what: str) -> LedgerError:
    wrote = entry.body.get("servanda", "of no version")
    return LedgerError(
        f"entry {entry.seq} (number {entry.n} of run {entry.run}) {what}",
        hint="the ledger was edited, or another version decides differently: the entry is by "
        f"servanda {wrote}, and this is {__version__}",
    )


def open_run(
    ledger: Ledger,
    contract: Contract,
    key: EvidenceKey,
    course: Sequence[Leg],
    fingerprints: Mapping[str, Mapping[str, str]],
    *,
    actor: str,
    now: float,
) -> History:
    """A new run for a key.

    Raises:
        Outrun: the key has a run already.
    """
    run = run_name(contract, key)
    kernels = contract.kernels
    body = {
        "contract": {"name": contract.metadata.name, "version": contract.metadata.version},
        "kernels": {
            "train": str(kernels.train),
            "infer": str(kernels.infer),
            "stable": str(contract.stable) if contract.stable else "",
        },
        "fingerprints": to_plain(fingerprints),
        "key": to_plain(key),
        "course": to_plain(tuple(course)),
        **outcome_body(begin(run, key, course, now=now)),
    }
    return replayed(ledger.append(run, [Record("opened", actor, now, body)], after=0))


def advance_run(
    ledger: Ledger, history: History, finding: LegFinding, *, actor: str, now: float
) -> History:
    """Advance a run by a finding; an evaluation without change writes no entry.

    Raises:
        EvidenceError: the clock went back, or the finding is for another step.
        Outrun: another process changed the run meanwhile.
    """
    moved = advance(history.course, history.state, finding, now=now)
    before = history.state
    if moved[0] == replace(before, seen=moved[0].seen):
        return history
    return _appended(ledger, history, "looked", actor, now, {"finding": to_plain(finding)}, moved)


def approve_run(
    ledger: Ledger, history: History, *, actor: str, reason: str, now: float
) -> History:
    moved = approve(history.course, history.state, actor=actor, reason=reason, now=now)
    return _appended(ledger, history, "approved", actor, now, {"reason": reason}, moved)


def override_cell(ledger: Ledger, history: History, given: Override, *, now: float) -> History:
    """Exclude a cell from decisions for a while.

    Raises:
        EvidenceError: the latest evaluation had no such cell; or as in `override`.
    """
    cells = history.evaluations[-1].finding.cells if history.evaluations else ()
    if not any(given.covers(cell) for cell in cells):
        known = ", ".join(cell.name for cell in cells) or "no cell yet"
        raise EvidenceError(
            f"promotion {history.run} has no cell {given.clause} on {given.slice} to override",
            hint=f"the latest evaluation judged {known}",
        )
    moved = override(history.course, history.state, given, now=now)
    body = {"override": to_plain(given)}
    return _appended(ledger, history, "overrode", given.actor, now, body, moved)


def roll_back_run(
    ledger: Ledger, history: History, *, actor: str, reason: str, now: float
) -> History:
    """Roll a run back.

    A clock that went back does not prevent it: the time is at least the latest of the run.
    """
    now = max(now, history.state.seen)
    moved = roll_back(history.course, history.state, actor=actor, reason=reason, now=now)
    return _appended(ledger, history, "rolled_back", actor, now, {"reason": reason}, moved)


def _appended(
    ledger: Ledger,
    history: History,
    kind: str,
    actor: str,
    now: float,
    body: Mapping[str, Any],
    moved: Move,
) -> History:
    record = Record(kind, actor, now, {**body, **outcome_body(moved)})
    return replayed(ledger.append(history.run, [record], after=history.last), history)
