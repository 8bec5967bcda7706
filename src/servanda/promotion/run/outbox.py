# The outbox: the notifications of a promotion's entries, until each receiver accepted them.
#
# A notification (effect) is written with the decision that it follows from, and delivered
# afterwards; an entry of kind `told` records the delivery to a receiver (sink).  A process that is
# killed in between delivers it again, with the same key, and nothing is lost.
#
# Routes come before messages: at each notifier they go first, and do not wait behind a message that
# a receiver refuses.  A route is complete in itself, so only the newest one counts: an older one
# that was not accepted is never sent late, since "25 % of the traffic" after a rollback would undo
# it.  Messages keep their order at each notifier.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from servanda.errors import EvidenceError, MeasurementError
from servanda.promotion.api import beginning_of
from servanda.promotion.ledger.entry import Entry, LedgerError, Outrun, Record
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.notify.base import Kind, Sink
from servanda.promotion.notify.http_post import insist
from servanda.promotion.run.history import DELIVERED
from servanda.promotion.state import ENDED, Effect
from servanda.traces.serialization import from_plain

ACTOR = "servanda"
_LANES: tuple[tuple[Kind, ...], ...] = (("route",), ("notify", "page"))


@dataclass(frozen=True)
class Delivery:
    """The result of delivering an effect to a notifier.

    Args:
        problem: why it was not accepted, and is retried by the next call; "" if it was.
        why: the reason why it need not be sent any more.
    """

    sink: str
    key: str
    problem: str = ""
    why: str = ""


def deliver(
    ledger: Ledger,
    run: str,
    sinks: Sequence[Sink],
    *,
    now: Callable[[], float],
    wait: Callable[[float], None],
) -> tuple[Delivery, ...]:
    """Deliver the pending notifications of a run.

    A failed notifier is skipped until the next call, and its notifications stay pending, so that
    messages keep their order.  The other notifiers are not affected.

    Args:
        now: unix seconds, for the entries.
        wait: sleeps for seconds between attempts.

    Returns:
        The attempts in order.  The run has one more entry for each success, so the caller must read
        its last n again.

    Raises:
        LedgerError: the ledger cannot be read or written, or an entry's effects are invalid. The
            last delivery is repeated by the next call.
    """
    return _delivered(_Outbox(ledger, run, now), sinks, wait)


def deliver_late(
    ledger: Ledger,
    contract: str,
    sinks: Sequence[Sink],
    *,
    now: Callable[[], float],
    wait: Callable[[float], None],
) -> tuple[Delivery, ...]:
    """Deliver the pending notifications of earlier promoters of a contract that were killed.

    Each run is delivered to the notifiers that received something of it before, not to new ones.
    The newest run is delivered to all if it has ended, because no one continues it.

    Raises:
        LedgerError: as in `deliver`.
    """
    boxes: list[_Outbox] = []
    for run in ledger.runs():
        if run.startswith(beginning_of(contract)):
            box = _Outbox(ledger, run, now)
            box.read()
            if box.contract == contract:
                boxes.append(box)
    deliveries: list[Delivery] = []
    for box in boxes:
        all_of_it = box is boxes[-1] and box.status in ENDED
        deliveries += _delivered(box, [s for s in sinks if all_of_it or box.knows(s)], wait)
    return tuple(deliveries)


def _delivered(
    box: _Outbox, sinks: Sequence[Sink], wait: Callable[[float], None]
) -> tuple[Delivery, ...]:
    return tuple(
        delivery
        for lane in _LANES
        for sink in sinks
        for delivery in _deliver(box, sink, lane, wait)
    )


def _deliver(
    box: _Outbox, sink: Sink, lane: tuple[Kind, ...], wait: Callable[[float], None]
) -> Iterator[Delivery]:
    while pending := box.pending(sink, lane):
        effect = pending[0]
        why = box.superseded(effect)
        if not why:
            try:
                if not insist(partial(_attempt, box, sink, effect), wait):
                    continue
            except MeasurementError as error:
                yield Delivery(sink.name, effect.key, str(error))
                return
        box.note(sink, effect, why)
        yield Delivery(sink.name, effect.key, why=why)


def _attempt(box: _Outbox, sink: Sink, effect: Effect) -> bool:
    """Attempt a delivery, unless it was delivered or superseded during a pause."""
    if effect not in box.pending(sink, (effect.kind,)) or box.superseded(effect):
        return False
    sink.deliver(effect)
    return True


class _Outbox:
    """The effects of a run and their deliveries; continues reading at the last entry."""

    def __init__(self, ledger: Ledger, run: str, now: Callable[[], float]) -> None:
        self._ledger, self._run, self._now = ledger, run, now
        self._effects: dict[str, Effect] = {}  # by key, in the order of the entries
        self._delivered: set[tuple[str, str]] = set()  # (key, name of the notifier)
        self._seq = self._n = 0
        self.contract = ""  # by name, once its first entry was read
        self.status = ""  # of the run

    def read(self) -> None:
        """Read later entries."""
        self._take(self._ledger.entries(self._run, since=self._seq))

    def knows(self, sink: Sink) -> bool:
        """Whether a notifier received anything of the run so far."""
        return any(name == sink.name for _, name in self._delivered)

    def pending(self, sink: Sink, kinds: tuple[Kind, ...]) -> list[Effect]:
        """The pending effects of a notifier, in the order of the ledger, which is read first."""
        self.read()
        return [
            effect
            for effect in self._effects.values()
            if effect.kind in kinds and effect.kind in sink.kinds
            if (effect.key, sink.name) not in self._delivered
        ]

    def superseded(self, effect: Effect) -> str:
        """The reason why it need not be sent any more; "" if it must."""
        if effect.kind != "route":
            return ""
        *_, newest = (e for e in self._effects.values() if e.kind == "route")
        turn = newest.body.get("turn")
        by = f"revision {turn}" if turn is not None else newest.key
        return "" if newest.key == effect.key else f"superseded by {by}"

    def note(self, sink: Sink, effect: Effect, why: str) -> None:
        """Record the delivery, unless another process has."""
        body = {"key": effect.key, "sink": sink.name} | ({"why": why} if why else {})
        while (effect.key, sink.name) not in self._delivered:
            record, after = Record(DELIVERED, ACTOR, self._now(), body), self._n
            try:
                self._take(self._ledger.append(self._run, [record], after=after))
            except Outrun:
                self.read()
                if self._n == after:
                    raise

    def _take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._seq, self._n = entry.seq, entry.n
            if entry.n == 1:
                self.contract = entry.body.get("contract", {}).get("name", "")
            if entry.kind == DELIVERED:
                self._delivered.add((entry.body["key"], entry.body["sink"]))
            self.status = entry.body.get("state", {}).get("status", self.status)
            for effect in _effects(entry):
                self._effects.setdefault(effect.key, effect)


def _effects(entry: Entry) -> tuple[Effect, ...]:
    place = f"entry {entry.seq}: effects"
    try:
        return from_plain(tuple[Effect, ...], entry.body.get("effects", []), place)
    except EvidenceError as error:
        raise LedgerError(
            error.problems[0].message, hint="was it written by another version, or by hand?"
        ) from None
