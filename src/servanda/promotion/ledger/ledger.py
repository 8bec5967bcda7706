# A ledger: a store, its hash chain, and the head checkpoint (witness).

from __future__ import annotations

from collections.abc import Iterator, Sequence

from servanda.promotion.ledger.entry import Damaged, Entry, LedgerError, Outrun, Record, Row
from servanda.promotion.ledger.hash_chain import Chain, content, digest, opened, sealed
from servanda.promotion.ledger.store import Store
from servanda.promotion.ledger.witness import Witness, missing

_LOOK = "`servanda promotion ledger verify` lists every altered entry; restore a copy"
_NAMED = 3  # later entries that an Outrun lists


class ChainedLedger:
    """See `Ledger`.  Made by `open_ledger`.

    Args:
        key: key of the hashes; b"": unkeyed.
    """

    def __init__(self, store: Store, witness: Witness, key: bytes = b"") -> None:
        self.store, self.witness, self.key = store, witness, key

    def append(self, run: str, records: Sequence[Record], *, after: int) -> tuple[Entry, ...]:
        with self.store.writing():
            self.refuse_missing()
            last, latest = self.store.last(), self.store.last(run)
            n = latest.n if latest else 0
            if n != after:
                raise self._outrun(run, after, n)
            for row in (last, latest):
                if row:  # nothing is appended to an altered entry
                    self._refuse(row, content(row, self.key))
            rows = sealed(last, run, n, records, self.key)
            self.store.insert(rows)
        if rows:
            self.witness.keep(rows[-1])
        return tuple(map(opened, rows))

    def entries(self, run: str | None = None, *, since: int = 0) -> Iterator[Entry]:
        last = self.store.last()
        until, n = last.seq if last else 0, None if since else 0
        chain = Chain(self.key, since)
        while page := self.store.page(run, since, until):
            for row in page:
                self._refuse(row, chain.faults(row) if run is None else content(row, self.key))
                if run is not None and n is not None and row.n != n + 1:
                    self._refuse(row, [f"it is number {row.n} of its run, and follows {n}"])
                since, n = row.seq, row.n
                yield opened(row)

    def runs(self) -> tuple[str, ...]:
        return self.store.runs()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> ChainedLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse_missing(self) -> None:
        """Refuse a ledger that lost an entry acknowledged on this machine.

        Raises:
            Damaged: it has.
        """
        head = self.witness.head()  # before the ledger is read, because it may grow meanwhile
        if head and (fault := missing(head, self.store)):
            raise Damaged(
                f"{self.store.name} was {fault}"
                if fault.startswith("truncated")
                else f"{self.store.name}: {fault}",
                hint=f"restore a copy; if you started a new ledger on purpose, remove "
                f"{self.witness.path}",
            )

    def _refuse(self, row: Row, faults: Sequence[str]) -> None:
        if faults:
            raise Damaged(
                f"{self.store.name}: entry {row.seq} of run {row.run!r}: {faults[0]}", hint=_LOOK
            )

    def _outrun(self, run: str, after: int, n: int) -> LedgerError | Outrun:
        if n < after:
            return LedgerError(
                f"{self.store.name}: run {run!r} ends at {n}, and its entry {after} was read "
                "before",
                hint="is it the same ledger? Read the run again",
            )
        later = [e for e in self.entries(run) if e.n > after]
        named = ", ".join(f"{e.n} {e.kind!r} by {e.actor}" for e in later[:_NAMED])
        more = f" and {len(later) - _NAMED} more" if len(later) > _NAMED else ""
        return Outrun(
            f"run {run!r} went on meanwhile: {named}{more}; {after} was the last one seen",
            hint="read the run again, and decide again",
        )


def mark_of(key: bytes) -> str:
    """A mark of the key that a ledger stores, to detect a wrong key before any entry."""
    return digest("a ledger of servanda", key)
