# A ledger in an SQLite file: for one machine, on a disk of its own (not over a network).
#
# WAL with synchronous=FULL: when a commit returns, it survives a power cut; readers never wait.

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from servanda.promotion.ledger.entry import COLUMNS, Damaged, LedgerError, Row
from servanda.promotion.ledger.store import (
    META,
    PATIENCE_S,
    SCHEMA,
    TABLE,
    Foreign,
    Queries,
    refuse_schema,
)
from servanda.promotion.ledger.witness import locked

T = TypeVar("T")

_PROBLEMS = 20  # of SQLite's own, shown at most
# what SQLite says where a file is broken, or its catalogue is
_BROKEN = ("malformed", "no such", "unsupported file format", "corrupt")
# a broken file also makes SQLite quote what is no text, or ask for more memory than there is
_FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
# name -> how it is made; the catalogue keeps these texts, and `faults` compares them
_LAYOUT = {
    META: f"CREATE TABLE {META} (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    TABLE: f"CREATE TABLE {TABLE} (seq INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "n INTEGER NOT NULL, at REAL NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, prev TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (run, n))",
    # in the order of seq, which SQLite keeps in every index: else each page sorts the whole run
    f"{TABLE}_run": f"CREATE INDEX {TABLE}_run ON {TABLE} (run)",
    **{
        f"{table}_{verb.lower()}": f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON "
        f"{table} BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END"
        for table in (META, TABLE)
        for verb in ("UPDATE", "DELETE")
    },
    # INSERT OR REPLACE asks no trigger of DELETE
    f"{TABLE}_insert": f"CREATE TRIGGER {TABLE}_insert BEFORE INSERT ON {TABLE} "
    f"WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM {TABLE}) OR NEW.n <> "
    f"(SELECT coalesce(max(n), 0) + 1 FROM {TABLE} WHERE run = NEW.run) "
    "BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END",
}


class SqliteStore(Queries):
    """See `Store`.

    Args:
        path: of the file.
        mark: of the key, kept where a ledger is begun.
        create: whether one is begun where there is none.
        reading: open for reading only; the file is not touched.

    Raises:
        Foreign: there is no ledger, or something else is in its place.
        Damaged: the file is broken.
        LedgerError: it cannot be opened or made, or is of a newer schema.
    """

    hole = "?"

    def __init__(self, path: Path, mark: str, *, create: bool, reading: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._find(create)
        self._db = self._connect("mode=ro" if reading else "mode=rwc")
        try:
            if reading:
                self._db = self._readable(self._db)
            if self._one("SELECT count(*) FROM sqlite_master") or not create:
                self._recognise()
            if not reading:
                self._prepare(mark)
        except BaseException:
            self._db.close()
            raise

    def _find(self, create: bool) -> None:
        """Make the folder of a new ledger; a file with something in it needs none."""
        path = self._path
        try:
            # not read here: closing any file of a database ends the locks that SQLite has on it
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
                f"{path} cannot be made: {error.strerror or error}",
                hint="name another place for the ledger",
            ) from None

    def _connect(self, how: str) -> sqlite3.Connection:
        uri = f"{self._path.absolute().as_uri()}?{how}"

        def connect() -> sqlite3.Connection:
            db = sqlite3.connect(uri, uri=True, timeout=PATIENCE_S, isolation_level=None)
            # a broken text is shown as it is, and has another hash
            db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            return db

        return self._run(connect)

    def _readable(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """A connection that reads also in a folder where SQLite may not put its own files."""
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            log = self._path.with_name(f"{self._path.name}-wal")
            if log.exists() and log.stat().st_size:
                return db  # entries may stand in the log alone
            db.close()
            return self._connect("immutable=1")
        except _FAILURES:
            pass  # is told where it is met next
        return db

    def _prepare(self, mark: str) -> None:
        try:
            # SQLite does not wait for another process that changes the journal's mode
            with locked(self._path):
                if self._one("PRAGMA journal_mode") != "wal":
                    self._one("PRAGMA journal_mode = wal")
        except OSError as error:
            raise LedgerError(
                f"{self._path} cannot be written: {error.strerror or error}",
                hint="name another place for the ledger",
            ) from None
        self._one("PRAGMA synchronous = full")
        if self._one("SELECT count(*) FROM sqlite_master"):
            return
        with self.writing():
            if self._one("SELECT count(*) FROM sqlite_master"):
                return  # another process was first
            for statement in _LAYOUT.values():
                self._db.execute(statement)
            rows = [("schema", SCHEMA), ("mark", mark)]
            self._db.executemany(f"INSERT INTO {META} VALUES (?, ?)", rows)

    def _recognise(self) -> None:
        names = {name for (name,) in self._all("SELECT name FROM sqlite_master")}
        if not {TABLE, META} & names:
            raise Foreign(
                f"{self._path} is an SQLite file without a ledger",
                hint="name another place for the ledger",
            )
        refuse_schema(self.name, self.marks().get("schema"))

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
                hint="make sure that the disk is sound and has room, then read the run again",
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
                hint="name another place for the ledger; an exported one ends in .jsonl",
            )
        # the plain kind is of what is corrupt; before Python 3.11 it may come without a word
        corrupt = not isinstance(error, sqlite3.Error) or type(error) is sqlite3.DatabaseError
        if corrupt or any(word in text for word in _BROKEN):
            return Damaged(
                f"{self._path} is damaged: {text or 'SQLite cannot read it'}",
                hint="`servanda promotion ledger verify` says what can still be read; restore "
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
            hint="check that the disk is local and writable, and that there is room",
        )
