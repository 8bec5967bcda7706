# A ledger in an SQLite file: for one machine, on a local disk (not over a network).

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from servanda.promotion.ledger.entry import Damaged, LedgerError
from servanda.promotion.ledger.store import ABSENT, META, PATIENCE_S, TABLE, Foreign, Queries
from servanda.promotion.ledger.witness import locked
from servanda.promotion.sql.sqlite import FAILURES, SqliteFile

_PROBLEMS = 20  # most SQLite findings shown
# SQLite's messages for a damaged file or catalogue
_BROKEN = ("malformed", "no such", "unsupported file format", "corrupt")
_ELSEWHERE = "give another location for the ledger"
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


class SqliteStore(SqliteFile, Queries):
    """See `Store`.

    Args:
        path: path of the file.
        mark: mark of the key, stored when a ledger is created.
        create: whether to create a missing ledger.
        reading: open read-only; the file is not modified.

    Raises:
        Foreign: there is no ledger, or another kind of file.
        Damaged: the file is damaged.
        LedgerError: it cannot be opened or created.
    """

    tables = tuple(_LAYOUT.values())

    def __init__(self, path: Path, mark: str, *, create: bool, reading: bool = False) -> None:
        self.name, self.path = str(path), path
        self._find(create)
        self._db = self._opened("mode=ro" if reading else "mode=rwc")
        try:
            if reading:
                self._make_readable()
            begun = self.recognised(create)
            if not reading:
                with LedgerError.of_system(f"{path} cannot be written", _ELSEWHERE), locked(path):
                    self._log_ahead()
                if not begun:
                    self.create(mark)
        except BaseException:
            self._db.close()
            raise

    def _find(self, create: bool) -> None:
        """Create the folder of a new ledger; an existing file needs none."""
        path = self.path
        with LedgerError.of_system(f"{path} cannot be read"):
            # not read here: closing any file of a database releases SQLite's locks on it
            if path.exists() and path.stat().st_size > 0:
                return
        if not create:
            raise Foreign(f"no ledger at {path}", hint=ABSENT)
        with LedgerError.of_system(f"{path} cannot be created", _ELSEWHERE):
            path.parent.mkdir(parents=True, exist_ok=True)

    def _opened(self, how: str) -> sqlite3.Connection:
        db = self._connect(PATIENCE_S, how)
        # invalid text is shown as it is, and has another hash
        db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        return db

    def _make_readable(self) -> None:
        """Connect in another way to a file in a folder without write permission."""
        try:
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            log = self.path.with_name(f"{self.path.name}-wal")
            if log.exists() and log.stat().st_size:
                return  # entries may be only in the write-ahead log
            self._db.close()
            self._db = self._opened("immutable=1")
        except FAILURES:
            pass  # the next access reports it

    def begun(self) -> bool:
        names = {name for (name,) in self._all("SELECT name FROM sqlite_master")}
        if names and not {TABLE, META} & names:
            raise Foreign(f"{self.path} is an SQLite file without a ledger", hint=_ELSEWHERE)
        return bool(names)

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

    def _failure(self, error: Exception, *, committing: bool = False) -> LedgerError:
        text = str(error)
        if committing:
            return LedgerError(
                f"{self.path}: {text}; it is not known whether the entries were kept",
                hint="check that the disk works and has free space, then read the run again",
            )
        if "not a database" in text:
            return Foreign(
                f"{self.path} is not an SQLite file",
                hint="give another location for the ledger; an exported one ends in .jsonl",
            )
        # the base class means corruption; before Python 3.11 its text may be empty
        corrupt = type(error) in (sqlite3.DatabaseError, UnicodeDecodeError, MemoryError)
        if corrupt or any(word in text for word in _BROKEN):
            return Damaged(
                f"{self.path} is damaged: {text or 'SQLite cannot read it'}",
                hint="`servanda promotion ledger verify` lists the readable entries; restore "
                "a copy",
            )
        if "locked" in text:
            return LedgerError(
                f"{self.path}: another process has been writing for {PATIENCE_S} s",
                hint="wait for it, or stop it; nothing was written",
            )
        if "closed" in text:
            return LedgerError(f"{self.path} was closed", hint="open the ledger again")
        return LedgerError(
            f"{self.path}: {text}",
            hint="check that the disk is local and writable, and has free space",
        )
