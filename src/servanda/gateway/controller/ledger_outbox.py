# From the outbox of a controller's store to the ledger, and from there to people.
#
# A record is in the store with the decision itself, and leaves it when the ledger has it.  The
# ledger may be away for as long as it likes, and a process killed in between says nothing twice.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from servanda.errors import ServandaError
from servanda.gateway.controller.store import Store
from servanda.promotion.ledger.entry import Ledger, Outrun, Record
from servanda.promotion.notify.base import Sink
from servanda.promotion.run.outbox import deliver
from servanda.traces.serialization import from_plain

_TRIES = 3  # to append, while others append to the same run


class LedgerOutbox:
    """Delivers records to the ledger, then to the receivers.

    Args:
        open_: the ledger; each time anew, for a connection may be lost.
        run, leader: whose entries they are; now: unix seconds; wait: seconds.

    `problem`, `missed`: what stands against the ledger, and against a receiver; "" for nothing.
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
        self._seq = self._n = self._o = 0  # of the run, and of our own entries in it
        self._late = bool(sinks)  # effects of an earlier life may wait
        self.problem = self.missed = ""

    def deliver(self) -> bool:
        """Tell what waits; whether all of it is told."""
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
        """Take what was written to the run since."""
        for entry in ledger.entries(self._run, since=self._seq):
            self._seq, self._n = entry.seq, entry.n
            if entry.body.get("leader") == self._leader:
                self._o = max(self._o, int(entry.body["o"]))
