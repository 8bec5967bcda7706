# The store of a controller in an SQLite file, locked by one process of this machine.

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from servanda.errors import MeasurementError
from servanda.gateway.controller.intake import Start
from servanda.gateway.controller.store import (
    ANEW,
    CLEANED_EVERY,
    SAMPLES,
    SAMPLES_S,
    SEEDS,
    STARTS,
    Commit,
)

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


class SqliteStore:
    """See `Store`; thread-safe by a lock.

    Args:
        folder: created if missing; locked by this process until `close`.

    Raises:
        MeasurementError: it cannot be written, is not a store, or another controller uses it.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._lock = folder / FILE, RLock()
        self.name, self.term, self.leads, self.lost = str(self.path), 0, True, False
        self._held = _hold(folder)
        self._commits = 0
        self._db: sqlite3.Connection | None = None
        try:
            with self._guarded():
                self._open()
        except BaseException:
            self.close()
            raise

    def meta(self, name: str) -> Any:
        rows = self._rows("SELECT value FROM meta WHERE name = ?", name)
        return json.loads(rows[0][0]) if rows else None

    def taken(self) -> dict[Start, int]:
        rows = self._rows("SELECT gateway, start, number FROM taken ORDER BY rowid")
        return {(gateway, start): number for gateway, start, number in rows}

    def seeds(self) -> tuple[int, ...]:
        return tuple(int(seed) for (seed,) in self._rows("SELECT seed FROM seeds ORDER BY id"))

    def outbox(self, most: int = 256) -> dict[int, Any]:
        rows = self._rows("SELECT n, record FROM outbox ORDER BY n LIMIT ?", most)
        return {n: json.loads(record) for n, record in rows}

    def behind(self) -> int:
        return self._rows("SELECT count(*) FROM outbox")[0][0]

    def commit(self, commit: Commit) -> None:
        with self._guarded(), self._present() as db:
            db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in commit.meta.items()],
            )
            db.executemany(
                "INSERT OR REPLACE INTO taken VALUES (?, ?, ?)",
                [(*start, number) for start, number in commit.taken.items()],
            )
            db.executemany(
                "INSERT OR IGNORE INTO outbox VALUES (?, ?)",
                [(n, json.dumps(record)) for n, record in commit.outbox.items()],
            )
            db.executemany(
                "INSERT INTO samples (at, slice, clause, total, tokens, missing, chance, key) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [tuple(vars(sample).values()) for sample in commit.samples],
            )
            db.executemany("INSERT INTO seeds (seed) VALUES (?)", [(str(s),) for s in commit.seeds])
            if self._commits % CLEANED_EVERY == 0:
                _sweep(db)
        self._commits += 1

    def delete_outbox(self, until: int) -> None:
        with self._guarded(), self._present() as db:
            db.execute("DELETE FROM outbox WHERE n <= ?", (until,))

    def check_present(self) -> None:
        with self._lock:
            if self._db is not None and _identity(self.path) != self._inode:
                db, self._db = self._db, None
                with suppress(sqlite3.Error):
                    db.close()
            if self._db is None:
                raise MeasurementError(f"{self.path} is gone")

    def renew(self, commit: Commit) -> None:
        with self._lock:
            if self._db is None:
                with self._guarded():
                    self._open()
            self.commit(commit)

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def _present(self) -> sqlite3.Connection:
        self.check_present()
        assert self._db is not None
        return self._db

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._guarded(), closing(self._present().execute(query, values)) as cursor:
            return cursor.fetchall()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # it holds the key of the traffic split; SQLite's side files get the same mode
        self.path.touch(0o600)
        self._db = sqlite3.connect(self.path, timeout=_PATIENCE_S, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (begun,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if begun:
                (schema,) = self._db.execute("PRAGMA user_version").fetchone()
                MeasurementError.refuse_form(self.path, schema or None, _SCHEMA, ANEW)
            else:
                statements = "; ".join((*_TABLES, f"PRAGMA user_version={_SCHEMA}"))
                self._db.executescript(f"BEGIN; {statements}; COMMIT;")
        except BaseException:
            db, self._db = self._db, None
            db.close()
            raise
        self._inode = _identity(self.path)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Serialise access; SQLite's exceptions become a MeasurementError."""
        with self._lock:
            try:
                yield
            except (sqlite3.Error, OSError, ValueError) as error:
                if self._db is not None:
                    with suppress(sqlite3.Error):
                        self._db.rollback()
                raise MeasurementError(
                    f"{self.path} cannot be used: {error}",
                    hint="free the disk or the lock; nothing is lost, and the write is retried",
                ) from None


def _sweep(db: sqlite3.Connection) -> None:
    """Delete data that is too old or beyond the limits."""
    (last,) = db.execute("SELECT coalesce(max(id), 0) FROM samples").fetchone()
    db.execute(
        "DELETE FROM samples WHERE id <= ? OR at < (SELECT max(at) FROM samples) - ?",
        (last - SAMPLES, SAMPLES_S),
    )
    (last,) = db.execute("SELECT coalesce(max(id), 0) FROM seeds").fetchone()
    db.execute("DELETE FROM seeds WHERE id <= ?", (last - SEEDS,))
    # by last write, not by start: a gateway may outlive many others
    db.execute(
        "DELETE FROM taken WHERE rowid NOT IN "
        "(SELECT rowid FROM taken ORDER BY rowid DESC LIMIT ?)",
        (STARTS,),
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _hold(folder: Path) -> int | None:
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
