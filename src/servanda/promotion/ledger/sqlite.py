# A ledger in an SQLite file: for one machine, on a local disk (not over a network).
#
# WAL with synchronous=FULL: a returned commit survives a power cut; readers never wait.

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from servanda.promotion.ledger.entry import COLUMNS, Damaged, LedgerError, Row
from servanda.promotion.ledger.store import META, PATIENCE_S, TABLE, Foreign, Queries
from servanda.promotion.ledger.witness import locked

T = TypeVar("T")

_PROBLEMS = 20  # most SQLite findings shown
# SQLite's messages for a damaged file or catalogue
_BROKEN = ("malformed", "no such", "unsupported file format", "corrupt")
# a damaged file also makes SQLite quote invalid text, or request too much memory
_FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
_RUN = f"{TABLE}_run"
# name -> its DDL; the catalogue stores these texts, and `faults` compares them
_LAYOUT = {
    META: f"CREATE TABLE {META} (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    TABLE: f"CREATE TABLE {TABLE} (seq INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "n INTEGER NOT NULL, at REAL NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, prev TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (run, n))",
    **{
        f"{table}_{verb.lower()}": f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON "
        f"{table} BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END"
        for table in (META, TABLE)
        for verb in ("UPDATE", "DELETE")
    },
    # INSERT OR REPLACE does not fire a DELETE trigger
    f"{TABLE}_insert": f"CREATE TRIGGER {TABLE}_insert BEFORE INSERT ON {TABLE} "
    f"WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM {TABLE}) OR NEW.n <> "
    f"(SELECT coalesce(max(n), 0) + 1 FROM {TABLE} WHERE run = NEW.run) "
    "BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END",
    # ordered by seq, which SQLite has in every index: otherwise each page sorts the whole run
    _RUN: f"CREATE INDEX {_RUN} ON {TABLE} (run)",
}


class SqliteStore(Queries):
    """See `Store`.

    Args:
        path: path of the file.
        mark: mark of the key, stored when a ledger is created.
        create: whether to create a missing ledger.
        reading: open read-only; the file is not modified.

    Raises:
        Foreign: there is no ledger, or another kind of file.
        Damaged: the file is damaged.
        LedgerError: it cannot be opened or created, or has another schema.
    """

    hole = "?"
    tables = tuple(_LAYOUT.values())

    def __init__(self, path: Path, mark: str, *, create: bool, reading: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._find(create)
        self._db = self._connect("mode=ro" if reading else "mode=rwc")
        try:
            if reading:
                self._db = self._readable(self._db)
            if self.begun() or not create:
                self._recognise()
            if not reading:
                self._prepare(mark)
        except BaseException:
            self._db.close()
            raise

    def _find(self, create: bool) -> None:
        """Create the folder of a new ledger; an existing file needs none."""
        path = self._path
        try:
            # not read here: closing any file of a database releases SQLite's locks on it
            if path.exists() and path.stat().st_size > 0:
                return
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror or error}") from None
        if not create:
            raise Foreign(
                f"no ledger at {path}",
                hint="pass --ledger, or start one with `servanda promote`",
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"{path} cannot be created: {error.strerror or error}",
                hint="give another location for the ledger",
            ) from None

    def _connect(self, how: str) -> sqlite3.Connection:
        uri = f"{self._path.absolute().as_uri()}?{how}"

        def connect() -> sqlite3.Connection:
            db = sqlite3.connect(uri, uri=True, timeout=PATIENCE_S, isolation_level=None)
            # invalid text is shown as it is, and has another hash
            db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            return db

        return self._run(connect)

    def _readable(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """A connection that can read in a folder without write permission."""
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            log = self._path.with_name(f"{self._path.name}-wal")
            if log.exists() and log.stat().st_size:
                return db  # entries may be only in the write-ahead log
            db.close()
            return self._connect("immutable=1")
        except _FAILURES:
            pass  # the next access reports it
        return db

    def _prepare(self, mark: str) -> None:
        try:
            # SQLite does not wait for another process that changes the journal mode
            with locked(self._path):
                if self._one("PRAGMA journal_mode") != "wal":
                    self._one("PRAGMA journal_mode = wal")
        except OSError as error:
            raise LedgerError(
                f"{self._path} cannot be written: {error.strerror or error}",
                hint="give another location for the ledger",
            ) from None
        self._one("PRAGMA synchronous = full")
        if not self.begun():
            with self.writing():
                self.create(mark)

    def _recognise(self) -> None:
        names = {name for (name,) in self._all("SELECT name FROM sqlite_master")}
        if not {TABLE, META} & names:
            raise Foreign(
                f"{self._path} is an SQLite file without a ledger",
                hint="give another location for the ledger",
            )
        self.refuse_form()

    def begun(self) -> bool:
        return bool(self._one("SELECT count(*) FROM sqlite_master"))

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._one("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, _FAILURES):
                raise self._translated(error) from None
            raise
        try:
            self._db.execute("COMMIT")
        except _FAILURES as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise LedgerError(
                f"{self._path}: {error}; it is not known whether the entries were kept",
                hint="check that the disk works and has free space, then read the run again",
            ) from None

    def insert(self, rows: Sequence[Row]) -> None:
        values = [astuple(row) for row in rows]
        marks = ", ".join("?" * len(COLUMNS))
        self._run(lambda: self._db.executemany(f"INSERT INTO {TABLE} VALUES ({marks})", values))

    def faults(self) -> Iterator[str]:
        try:
            made = dict(self._all("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
            if made != _LAYOUT:
                odd = sorted(n for n in {*made, *_LAYOUT} if made.get(n) != _LAYOUT.get(n))
                yield f"the file is not laid out as servanda does: {', '.join(odd)}"
            for (text,) in self._all(f"PRAGMA integrity_check({_PROBLEMS})"):
                if text != "ok":
                    yield f"SQLite finds: {' '.join(text.split())}"
        except Damaged as error:
            yield error.problems[0].message

    def close(self) -> None:
        self._db.close()

    def _one(self, query: str) -> object:
        row = self._run(lambda: self._db.execute(query).fetchone())
        return row[0] if row else None

    def _all(self, query: str, *values: object) -> list[tuple]:
        return self._run(lambda: self._db.execute(query, values).fetchall())

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except _FAILURES as error:
            raise self._translated(error) from None

    def _translated(self, error: Exception) -> LedgerError:
        text = str(error)
        if "not a database" in text:
            return Foreign(
                f"{self._path} is not an SQLite file",
                hint="give another location for the ledger; an exported one ends in .jsonl",
            )
        # the base class means corruption; before Python 3.11 its text may be empty
        corrupt = not isinstance(error, sqlite3.Error) or type(error) is sqlite3.DatabaseError
        if corrupt or any(word in text for word in _BROKEN):
            return Damaged(
                f"{self._path} is damaged: {text or 'SQLite cannot read it'}",
                hint="`servanda promotion ledger verify` lists the readable entries; restore "
                "a copy",
            )
        if "locked" in text:
            return LedgerError(
                f"{self._path}: another process has been writing for {PATIENCE_S} s",
                hint="wait for it, or stop it; nothing was written",
            )
        if "closed" in text:
            return LedgerError(f"{self._path} was closed", hint="open the ledger again")
        return LedgerError(
            f"{self._path}: {text}",
            hint="check that the disk is local and writable, and has free space",
        )
