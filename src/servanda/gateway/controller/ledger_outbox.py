# Delivers the outbox of a controller's store to the ledger, and from there to notifiers.
#
# A record is stored with its decision and deleted once the ledger has it.  So the ledger may be
# unavailable for any time, and a process killed in between writes no entry twice.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from servanda.errors import ServandaError
from servanda.gateway.controller.store import Store
from servanda.promotion.ledger.entry import Outrun, Record
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.notify.base import Sink
from servanda.promotion.run.outbox import deliver
from servanda.traces.serialization import from_plain

_TRIES = 3  # to append, while others append to the same run


class LedgerOutbox:
    """Delivers records to the ledger, then to the notifiers.

    Args:
        open_: opens the ledger; called each time, because a connection may be lost.
        run, leader: the owner of the entries; now: returns unix seconds; wait: sleeps for seconds.

    `problem`, `missed`: the problem of the ledger and of a notifier; "" for none.
    """

    def __init__(
        self,
        store: Store,
        open_: Callable[[], Ledger],
        run: str,
        leader: str,
        sinks: Sequence[Sink],
        *,
        now: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        self._store, self._open, self._sinks = store, open_, sinks
        self._run, self._leader, self._now, self._wait = run, leader, now, wait
        self._seq = self._n = self._o = 0  # of the run, and of its own entries in it
        self._late = bool(sinks)  # notifications of an earlier process may be pending
        self.problem = self.missed = ""

    def deliver(self) -> bool:
        """Deliver all pending records; returns whether none is left.

        Another leader delivers them when this one does not lead.
        """
        if not self._store.leads:
            return False
        try:
            if not self._store.behind() and not self._late:
                return True
            with closing(self._open()) as ledger:
                self._append(ledger)
                self.problem = ""
                if self._late:
                    wait, now = self._wait, self._now
                    deliveries = deliver(ledger, self._run, self._sinks, now=now, wait=wait)
                    missed = [
                        f"{d.sink} was not notified: {d.problem}" for d in deliveries if d.problem
                    ]
                    self.missed, self._late = "; ".join(missed), bool(missed)
        except ServandaError as error:
            self.problem = str(error).split("\n", 1)[0]
        return not self.problem and not self._late

    def _append(self, ledger: Ledger) -> None:
        while pending := self._store.outbox():
            for last in range(_TRIES):
                self._read(ledger)
                records = [
                    from_plain(Record, record) for o, record in pending.items() if o > self._o
                ]
                try:
                    ledger.append(self._run, records, after=self._n)
                    break
                except Outrun:
                    if last == _TRIES - 1:
                        raise
            self._store.delete_outbox(max(pending))
            self._late = bool(self._sinks)

    def _read(self, ledger: Ledger) -> None:
        """Read the entries that were written to the run since."""
        for entry in ledger.entries(self._run, since=self._seq):
            self._seq, self._n = entry.seq, entry.n
            if entry.body.get("leader") == self._leader:
                self._o = max(self._o, int(entry.body["o"]))
