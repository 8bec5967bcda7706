# A ledger: an append-only sequence of entries, from which the current state is derived.
#
# It is a store, its hash chain, and the head checkpoint (witness); opened at a location, once its
# content can be trusted.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from servanda.promotion.ledger.entry import Damaged, Entry, LedgerError, Outrun, Record, Row
from servanda.promotion.ledger.export import SUFFIX, ExportedStore
from servanda.promotion.ledger.hash_chain import Chain, content, digest, opened, sealed
from servanda.promotion.ledger.sqlite import SqliteStore
from servanda.promotion.ledger.store import Foreign, Store
from servanda.promotion.ledger.witness import Witness, missing

_SERVERS = ("postgresql", "postgres")
_LOOK = "`servanda promotion ledger verify` lists every altered entry; restore a copy"
_NAMED = 3  # later entries that an Outrun lists


class Ledger:
    """A ledger that is open.  Made by `open_ledger`.

    Args:
        key: key of the hashes; b"": unkeyed.
    """

    def __init__(self, store: Store, witness: Witness, key: bytes = b"") -> None:
        self.store, self.witness, self.key = store, witness, key

    def append(self, run: str, records: Sequence[Record], *, after: int) -> tuple[Entry, ...]:
        """Append records after a run's last entry: all or none, durable on return.

        Args:
            after: n of the run's last entry that the caller has seen; 0 for a new run.

        Raises:
            Outrun: the run has later entries.
            LedgerError: it cannot be written; if the connection was lost meanwhile, only reading
                the run shows whether it was.
        """
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
        """The entries with seq > `since`, of one run or of all, in order.

        Raises:
            Damaged: an entry was altered.
        """
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
        """The names of the runs, oldest first."""
        return self.store.runs()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Ledger:
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


def open_ledger(
    where: str, *, witness: Path | None = None, key: bytes = b"", reading: bool = False
) -> Ledger:
    """Open the ledger at a location; created there unless it is opened for reading.

    Args:
        where: a path, or sqlite:///PATH, for SQLite; postgresql://... for PostgreSQL; a path
            that ends in .jsonl is an exported, read-only one.
        witness: the head checkpoint, a file with the last entry acknowledged on this machine; None:
            FILE.head beside an SQLite file, none for others.
        key: key of the hashes; the same at every opening.

    Raises:
        Damaged: it is damaged, or lacks an entry that was acknowledged here.
        LedgerError: it cannot be reached or created, or the key is wrong.
    """
    ledger = unchecked(where, witness, key, reading=reading)
    try:
        refusal = other_key(ledger)
        if refusal:
            raise LedgerError(refusal, hint="open it with the key that it was created with")
        if isinstance(ledger.store, ExportedStore):
            for fault in ledger.store.faults():
                raise Damaged(fault, hint="export the ledger again")
        ledger.refuse_missing()
    except BaseException:
        ledger.close()
        raise
    return ledger


def unchecked(where: str, witness: Path | None, key: bytes, *, reading: bool) -> Ledger:
    """Open the ledger at a location, whatever became of its entries.

    Args, Raises: see `open_ledger`.
    """
    scheme, separator, rest = where.partition("://")
    if separator and scheme not in (*_SERVERS, "sqlite"):
        raise LedgerError(
            f"no ledger is kept at {scheme}://",
            hint="a path keeps it in SQLite, postgresql://... in PostgreSQL",
        )
    if separator and scheme in _SERVERS:
        beside, path = Witness(witness), None
    else:
        path = Path(rest.removeprefix("/") if separator else where)
        if not path.name or path.is_dir():
            raise LedgerError(
                f"{path} is a folder, and a ledger is a file",
                hint=f"name a file in it, such as {path / 'ledger.db'}",
            )
        default = None if path.suffix == SUFFIX else path.with_name(f"{path.name}.head")
        beside = Witness(witness or default)
    head = beside.head()
    mark = mark_of(key)
    create = not reading and head is None
    try:
        if path is None:
            from servanda.promotion.ledger.postgres import PostgresStore

            store: Store = PostgresStore(where, mark, create=create)
        elif path.suffix == SUFFIX:
            store = ExportedStore(path)
        else:
            store = SqliteStore(path, mark, create=create, reading=reading)
    except ImportError as error:
        raise LedgerError(
            f"a ledger in PostgreSQL needs psycopg: {str(error).strip().splitlines()[0]}",
            hint="pip install 'servanda[postgres]'",
        ) from None
    except Foreign as error:
        if head is None:
            raise
        message = f"{error.problems[0].message}, and entry {head.seq} was acknowledged here"
        hint = f"restore a copy; to start a new ledger on purpose, remove {beside.path}"
        raise Damaged(message, hint=hint) from None
    return Ledger(store, beside, key)


def other_key(ledger: Ledger) -> str:
    """The message for a key that the ledger was not created with; "" if it was."""
    mark = ledger.store.marks().get("mark")
    if mark in (None, mark_of(ledger.key)):
        return ""
    if mark == mark_of(b""):
        return f"{ledger.store.name} was created without a key, and one is given"
    given = "another one is given" if ledger.key else "none is given"
    return f"{ledger.store.name} was created with a key, and {given}"
