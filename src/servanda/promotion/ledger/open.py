# Opening: the store of a location, and the check that its content can be trusted.

from __future__ import annotations

from pathlib import Path

from servanda.promotion.ledger.entry import Damaged, LedgerError
from servanda.promotion.ledger.export import SUFFIX, ExportedStore
from servanda.promotion.ledger.hash_chain import FIRST
from servanda.promotion.ledger.ledger import ChainedLedger, mark_of
from servanda.promotion.ledger.sqlite import SqliteStore
from servanda.promotion.ledger.store import Foreign, Store
from servanda.promotion.ledger.verify import Problem, Verified, verify
from servanda.promotion.ledger.witness import Witness

_SERVERS = ("postgresql", "postgres")


def open_ledger(
    where: str, *, witness: Path | None = None, key: bytes = b"", reading: bool = False
) -> ChainedLedger:
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
    ledger = _open(where, witness, key, reading=reading)
    try:
        refusal = _other_key(ledger)
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


def verify_at(where: str, *, witness: Path | None = None, key: bytes = b"") -> Verified:
    """Verify the ledger at a location, even one that is too damaged to be opened.

    Args: see `open_ledger`.

    Raises:
        LedgerError: there is no ledger, or it cannot be reached.
    """
    try:
        ledger = _open(where, witness, key, reading=True)
    except Damaged as error:
        return Verified(0, FIRST, (Problem(None, "", error.problems[0].message),))
    with ledger:
        result = verify(ledger)
        refusal = _other_key(ledger)
    if refusal:
        return Verified(result.entries, result.head, (Problem(None, "", refusal), *result.problems))
    return result


def _open(where: str, witness: Path | None, key: bytes, *, reading: bool) -> ChainedLedger:
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
            store: Store = _server(where, mark, create)
        elif path.suffix == SUFFIX:
            store = ExportedStore(path)
        else:
            store = SqliteStore(path, mark, create=create, reading=reading)
    except Foreign as error:
        if head is None:
            raise
        message = f"{error.problems[0].message}, and entry {head.seq} was acknowledged here"
        hint = f"restore a copy; to start a new ledger on purpose, remove {beside.path}"
        raise Damaged(message, hint=hint) from None
    return ChainedLedger(store, beside, key)


def _server(where: str, mark: str, create: bool) -> Store:
    try:
        from servanda.promotion.ledger.postgres import PostgresStore
    except ImportError as error:
        raise LedgerError(
            f"a ledger in PostgreSQL needs psycopg: {str(error).strip().splitlines()[0]}",
            hint="pip install 'servanda[postgres]'",
        ) from None
    return PostgresStore(where, mark, create=create)


def _other_key(ledger: ChainedLedger) -> str:
    """The message for a key that the ledger was not created with; "" if it was."""
    mark = ledger.store.marks().get("mark")
    if mark in (None, mark_of(ledger.key)):
        return ""
    if mark == mark_of(b""):
        return f"{ledger.store.name} was created without a key, and one is given"
    given = "another one is given" if ledger.key else "none is given"
    return f"{ledger.store.name} was created with a key, and {given}"
