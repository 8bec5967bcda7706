# The store of a controller: its durable data.
#
# A commit is one transaction: the state, the progress of each gateway's rows, the records for the
# ledger, and the numbers of each sample.  It stores no text, and of users only a keyed hash.

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

from servanda.errors import MeasurementError
from servanda.gateway.controller.intake import Start
from servanda.promotion.sql.sqlite import SqliteFile

SAMPLES, SAMPLES_S = 200_000, 7 * 86_400.0  # kept: most of them, and their age
STARTS = 256  # of gateways, kept
SEEDS = 65_536  # kept
CLEANED_EVERY = 64  # commits between two cleanups
LEASE_S = 10.0  # how long a leader that is gone keeps the lead
ANEW = "start a new state: name another --state"  # the next move for one of another form
_SERVERS = ("postgresql", "postgres")


@dataclass(frozen=True)
class Sample:
    """The stored numbers of one scored request in one cell."""

    at: float
    slice: str
    clause: str
    total: float
    tokens: int
    missing: int
    chance: float
    key: str


@dataclass(frozen=True)
class Commit:
    """The data of one transaction.

    Args:
        meta: name -> plain data.
        taken: per gateway process, number of the first row that is not in the state.
        outbox: number -> record for the ledger.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    taken: Mapping[Start, int] = field(default_factory=dict)
    outbox: Mapping[int, Any] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    seeds: Sequence[int] = ()


class StandbyError(MeasurementError):
    """Another leader leads."""


# table -> its columns, but for those that a database fills in
COLUMNS = {
    "meta": "name, value",
    "taken": "gateway, start, number",
    "outbox": "n, record",
    "samples": "at, slice, clause, total, tokens, missing, chance, key",
    "seeds": "seed",
}


class Store(ABC):
    """The store of one contract; any thread may use it.

    Queries begin with a table's `_rows_of`, and their values stand at each `?`.
    """

    name: str  # its place, for messages
    _commits = 0
    _key: tuple[str, ...] = ()  # the values of `_rows_of`
    _latest: ClassVar[str]  # the column of `taken` that a later write makes larger

    @property
    def term(self) -> int:
        """Grows from leader to leader."""
        return 0

    @property
    def leads(self) -> bool:
        """Whether this process may answer and act now."""
        return True

    @property
    def lost(self) -> bool:
        """Whether it may never again: another leader leads, or a commit may have been stored."""
        return False

    def meta(self, name: str) -> Any:
        """Stored plain data, or None."""
        rows = self._rows(f"SELECT value FROM {self._rows_of('meta')} AND name = ?", name)
        return json.loads(rows[0][0]) if rows else None

    def taken(self) -> dict[Start, int]:
        """Per gateway process, number of the first row that is not in the state."""
        rows = self._ordered("taken", self._latest)
        return {(gateway, start): number for gateway, start, number in rows}

    def seeds(self) -> tuple[int, ...]:
        return tuple(int(seed) for (seed,) in self._ordered("seeds", "id"))

    def outbox(self, most: int = 256) -> dict[int, Any]:
        """Records that are not in the ledger yet, oldest first."""
        return {n: json.loads(record) for n, record in self._ordered("outbox", "n LIMIT ?", most)}

    def behind(self) -> int:
        """The number of records that are not in the ledger yet."""
        return self._rows(f"SELECT count(*) FROM {self._rows_of('outbox')}")[0][0]

    def commit(self, commit: Commit) -> None:
        """Store all of it, or nothing.

        Raises:
            MeasurementError: it could not be stored; a retry may succeed unless `lost`.
        """
        rows: dict[str, list[tuple[Any, ...]]] = {
            "meta": [(name, json.dumps(value)) for name, value in commit.meta.items()],
            "taken": [(*start, number) for start, number in commit.taken.items()],
            "outbox": [(n, json.dumps(record)) for n, record in commit.outbox.items()],
            "samples": [tuple(vars(sample).values()) for sample in commit.samples],
            "seeds": [(str(seed),) for seed in commit.seeds],
        }
        with self._changing():
            for table in filter(rows.get, rows):
                self._add(table, rows[table])
            if self._commits % CLEANED_EVERY == 0:
                self._sweep()
        self._commits += 1

    def delete_outbox(self, until: int) -> None:
        """Delete the records up to a number: the ledger has them."""
        with self._changing():
            self._rows(f"DELETE FROM {self._rows_of('outbox')} AND n <= ?", until)

    def check_present(self) -> None:  # noqa: B027 - a server has no file
        """Refuse to write to a deleted or replaced file.

        A table that is gone is an error of the statement that needs it.

        Raises:
            MeasurementError: the file is gone or was replaced.
        """

    def renew(self, commit: Commit) -> None:
        """Create the file again with all data if it is gone.

        Raises:
            MeasurementError: it cannot be created.
        """
        self.commit(commit)

    @abstractmethod
    def close(self) -> None:
        """Let another leader lead."""

    def _ordered(self, table: str, by: str, *values: Any) -> list[tuple[Any, ...]]:
        query = f"SELECT {COLUMNS[table]} FROM {self._rows_of(table)} ORDER BY {by}"
        return self._rows(query, *values)

    def _sweep(self) -> None:
        """Delete data that is too old or beyond the limits."""
        samples = self._rows_of("samples")
        self._rows(
            f"DELETE FROM {samples} AND at < (SELECT max(at) FROM {samples}) - ?",
            *self._key,
            SAMPLES_S,
        )
        # by last write, not by start: a gateway may outlive many others
        limits = {
            ("samples", "id"): SAMPLES,
            ("seeds", "id"): SEEDS,
            ("taken", self._latest): STARTS,
        }
        for (table, column), most in limits.items():
            of = self._rows_of(table)
            self._rows(
                f"DELETE FROM {of} AND {column} <= "
                f"(SELECT {column} FROM {of} ORDER BY {column} DESC LIMIT 1 OFFSET ?)",
                *self._key,
                most,
            )

    @abstractmethod
    def _rows_of(self, table: str) -> str:
        """A table, and the condition that a row is of this contract."""

    @abstractmethod
    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a query; the values of its first `_rows_of` are added."""

    @abstractmethod
    def _add(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows in their order; later ones replace those of the same key."""

    @abstractmethod
    def _changing(self) -> AbstractContextManager[None]:
        """One transaction of the leader, or none."""


def is_server(place: str | Path) -> bool:
    """Whether a place is the URL of a database server, which several leaders may share."""
    return str(place).partition("://")[0] in _SERVERS and "://" in str(place)


def open_store(
    place: str | Path, contract: str, *, leader: str = "", lease_s: float = LEASE_S
) -> Store:
    """The store of a contract.

    Args:
        place: a folder, created if missing; or postgresql://..., for several leaders.
        leader: how messages name this leader, such as the URL of its page.
        lease_s: how long it keeps the lead in PostgreSQL when it is gone.

    Raises:
        StandbyError: another leader leads.
        MeasurementError: it cannot be used.
    """
    if not is_server(place):
        return SqliteStore(Path(place))
    try:
        from servanda.gateway.controller.postgres_store import PostgresStore
    except ImportError as error:
        raise MeasurementError(
            f"a state in PostgreSQL needs psycopg: {str(error).strip().splitlines()[0]}",
            hint="pip install 'servanda[postgres]'",
        ) from None
    return PostgresStore(str(place), contract, leader, lease_s)


# The store of a controller in an SQLite file, locked by one process of this machine.

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
    with MeasurementError.of_system(f"{folder} cannot be used", hint="name another --state"):
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder / "leader.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise MeasurementError(
            f"{folder} is in use by another leader", hint="end that one, or name another --state"
        ) from None
    return held
