# The store of a controller in an SQLite file, locked by one process of this machine.

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from servanda.errors import MeasurementError
from servanda.gateway.controller.store import ANEW, COLUMNS, Commit, Store
from servanda.promotion.sql.sqlite import SqliteFile

FILE = "leader.db"
_PATIENCE_S = 2.0  # for another process that reads the file
_SCHEMA = 1  # of the tables, which the file states as its user_version
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE taken "
    "(gateway TEXT, start REAL, number INTEGER NOT NULL, PRIMARY KEY (gateway, start))",
    "CREATE TABLE outbox (n INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    "CREATE TABLE samples (id INTEGER PRIMARY KEY, at REAL, slice TEXT, "
    "clause TEXT, total REAL, tokens INTEGER, missing INTEGER, chance REAL, key TEXT)",
    "CREATE TABLE seeds (id INTEGER PRIMARY KEY, seed TEXT)",
)


class SqliteStore(SqliteFile, Store):
    """See `Store`; thread-safe by a lock.

    Args:
        folder: created if missing; locked by this process until `close`.

    Raises:
        MeasurementError: it cannot be written, is not a store, or another controller uses it.
    """

    _latest = "rowid"

    def __init__(self, folder: Path) -> None:
        self.path, self._lock = folder / FILE, RLock()
        self.name = str(self.path)
        self._held: int | None = _hold(folder)
        self._inode: tuple[int, int] | None = None  # of the file that is written to
        try:
            self._open()
        except BaseException:
            os.close(self._held)
            raise

    def check_present(self) -> None:
        with self._lock:
            if self._inode is None or self._inode != _identity(self.path):
                self._inode = None
                with suppress(sqlite3.Error):
                    self._db.close()
                raise MeasurementError(f"{self.path} is gone")

    def renew(self, commit: Commit) -> None:
        with self._lock:
            if self._inode is None:
                self._open()
            self.commit(commit)

    def close(self) -> None:
        with self._lock:
            self._inode = None
            self._db.close()
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # it holds the key of the traffic split; SQLite's side files get the same mode
            self.path.touch(0o600)
        except OSError as error:
            raise self._failure(error) from None
        self._db = self._connect(_PATIENCE_S, any_thread=True)
        try:
            self._log_ahead()
            if self._one("SELECT count(*) FROM sqlite_master"):
                schema = self._one("PRAGMA user_version")
                MeasurementError.refuse_form(self.path, schema or None, _SCHEMA, ANEW)
            else:
                with self.writing():
                    for statement in (*_TABLES, f"PRAGMA user_version={_SCHEMA}"):
                        self._all(statement)
        except BaseException:
            self._db.close()
            raise
        self._inode = _identity(self.path)

    def _rows_of(self, table: str) -> str:
        return f"{table} WHERE true"

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            self.check_present()
            return self._all(query, *values)

    def _add(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        otherwise = "IGNORE" if table == "outbox" else "REPLACE"
        holes = ", ".join("?" * len(rows[0]))
        self._many(f"INSERT OR {otherwise} INTO {table} ({COLUMNS[table]}) VALUES ({holes})", rows)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self.check_present()
            with self.writing():
                yield

    def _failure(self, error: Exception, *, committing: bool = False) -> MeasurementError:
        return MeasurementError(
            f"{self.path} cannot be used: {error}",
            hint="free the disk or the lock; nothing is lost, and the write is retried",
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _hold(folder: Path) -> int:
    """Lock a folder, so that no two controllers write one state."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder / "leader.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise MeasurementError(
            f"{folder} cannot be used: {error.strerror or error}", hint="name another --state"
        ) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise MeasurementError(
            f"{folder} is in use by another leader", hint="end that one, or name another --state"
        ) from None
    return held
