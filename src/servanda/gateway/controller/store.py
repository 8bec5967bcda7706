# The store of a controller: its durable data.
#
# A commit is one transaction: the state, the progress of each gateway's rows, the records for the
# ledger, and the numbers of each sample.  It stores no text, and of users only a keyed hash.

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

import psycopg

from servanda.errors import MeasurementError
from servanda.gateway.controller.intake import Start
from servanda.promotion.sql.postgres import Database, fetched
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
        from servanda.gateway.controller.store import SqliteStore

        return SqliteStore(Path(place))
    try:
        from servanda.gateway.controller.store import PostgresStore
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


# The store of a controller in a PostgreSQL database, for several leaders of which one leads.
# psycopg 3, of the extra [postgres].
#
# Every table has the name of the contract as its first column, so that one database may hold many.
#
# The lead of a contract is a row that at most one leader holds.  It has a term, which grows when
# another leader takes the lead, and the end of the lease by the database's clock.  Each transaction
# of a leader renews the row of its own term, so that the transaction of a leader that was replaced
# fails as a whole.  Locally a lease ends earlier: its time is counted from the request of the
# renewal, which the database receives later.
#
# A leader that stands still in the middle of a transaction keeps its locks: the server waits for
# the rest of a message without any timeout.  So the next leader ends the sessions of an expired
# term.


TABLE = "servanda_leader"
_SILENT_S = 10  # for a connection that is silent, and for another process that creates the tables
_CREATING = 0x5365727662  # the advisory lock of their creation
_PG_SCHEMA = 1
_PG_TABLES = (
    f"CREATE TABLE {TABLE} (contract text PRIMARY KEY, term bigint NOT NULL, leader text NOT NULL, "
    "until timestamptz NOT NULL)",
    f"CREATE TABLE {TABLE}_meta (contract text, name text, value text NOT NULL, "
    "PRIMARY KEY (contract, name))",
    f"CREATE SEQUENCE {TABLE}_order",
    f"CREATE TABLE {TABLE}_taken (contract text, gateway text, start double precision, "
    f"number bigint NOT NULL, n bigint NOT NULL DEFAULT nextval('{TABLE}_order'), "
    "PRIMARY KEY (contract, gateway, start))",
    f"CREATE TABLE {TABLE}_outbox (contract text, n bigint, record text NOT NULL, "
    "PRIMARY KEY (contract, n))",
    f"CREATE TABLE {TABLE}_samples (contract text, id bigint GENERATED ALWAYS AS IDENTITY, "
    "at double precision, slice text, clause text, total double precision, tokens bigint, "
    "missing bigint, chance double precision, key text, PRIMARY KEY (contract, id))",
    f"CREATE TABLE {TABLE}_seeds (contract text, id bigint GENERATED ALWAYS AS IDENTITY, "
    "seed text NOT NULL, PRIMARY KEY (contract, id))",
)
# of the columns of `COLUMNS`
_TYPES = {
    "meta": "text, text",
    "taken": "text, double precision, bigint",
    "outbox": "bigint, text",
    "samples": "double precision, text, text, double precision, bigint, bigint, double precision, "
    "text",
    "seeds": "text",
}
_CONFLICTS = {
    "meta": "ON CONFLICT (contract, name) DO UPDATE SET value = excluded.value",
    "taken": "ON CONFLICT (contract, gateway, start) "
    "DO UPDATE SET number = excluded.number, n = excluded.n",
}
_TAKE = f"""
INSERT INTO {TABLE} AS held
VALUES (%(contract)s, 1, %(leader)s, clock_timestamp() + %(lease)s::interval)
ON CONFLICT (contract) DO UPDATE SET term = held.term + 1, leader = excluded.leader,
    until = clock_timestamp() + %(lease)s::interval WHERE held.until < clock_timestamp()
RETURNING term
"""
_RENEW = (
    f"UPDATE {TABLE} SET until = clock_timestamp() + %(lease)s::interval "
    "WHERE contract = %(contract)s AND term = %(term)s"
)
_END = f"UPDATE {TABLE} SET until = clock_timestamp() WHERE contract = %s AND term = %s"
# the sessions of a term, whichever schema and database have the same contract
_SESSIONS = (
    "SELECT 'servanda-' || left(md5(current_database() || '.' || current_schema() || '.' || %s), "
    "16) || '-' || %s"
)
_NAME = f"SELECT set_config('application_name', ({_SESSIONS}), false)"
_TERMINATE = f"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = ({_SESSIONS})
"""
_EXPIRED = f"SELECT term FROM {TABLE} WHERE contract = %s AND until < clock_timestamp()"
_LOCK_S = 1.0  # for the lock of the row
_HELD = (
    f"SELECT leader, extract(epoch FROM until - clock_timestamp()) FROM {TABLE} WHERE contract = %s"
)


class PostgresStore(Store):
    """See `Store`.

    Args:
        url: postgresql://[user[:password]@]host[:port]/database[?options], as of libpq.
        contract: its name; leader: how messages name this leader.
        lease_s: how long this leader keeps the lead when it is gone.

    Raises:
        StandbyError: another leader leads.
        MeasurementError: the database cannot be used.
    """

    _latest = "n"

    def __init__(self, url: str, contract: str, leader: str, lease_s: float) -> None:
        self._database = Database(
            url, "state", MeasurementError, patience_s=_SILENT_S, idle_s=lease_s
        )
        self.name, self._contract, self._key = self._database.name, contract, (contract,)
        self._lock, self._unsure, self._in_transaction = RLock(), False, False
        self._db = self._database.connect()
        try:
            with self._guarded():
                self._create()
                self._lease = Lease(self._database.connect, contract, leader, lease_s)
                self._lease.name_session(self._db)
        except BaseException:
            self._db.close()
            raise

    @property
    def term(self) -> int:
        return self._lease.term

    @property
    def leads(self) -> bool:
        return self._lease.holds and not self._unsure

    @property
    def lost(self) -> bool:
        return self._lease.lost or self._unsure

    def close(self) -> None:
        self._lease.end()
        with self._lock, suppress(psycopg.Error):
            self._db.close()

    def _create(self) -> None:
        """Create the tables, unless they are there."""
        with self._db.transaction():
            self._db.execute("SELECT pg_advisory_xact_lock(%s)", (_CREATING,))
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {TABLE}_layout (layout int NOT NULL)")
            found = self._db.execute(f"SELECT layout FROM {TABLE}_layout").fetchone()
            if found:
                MeasurementError.refuse_form(self.name, found[0], _PG_SCHEMA, ANEW)
                return
            for statement in _PG_TABLES:
                self._db.execute(statement.encode())
            self._db.execute(f"INSERT INTO {TABLE}_layout VALUES (%s)", (_PG_SCHEMA,))

    def _rows_of(self, table: str) -> str:
        return f"{TABLE}_{table} WHERE contract = ?"

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        # in a transaction `_changing` guards it, which opens no other connection
        with self._lock if self._in_transaction else self._guarded():
            return fetched(self._db, query, *self._key, *values)

    def _add(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """By one statement."""
        arrays = ", ".join(f"?::{kind}[]" for kind in _TYPES[table].split(", "))
        self._rows(
            f"INSERT INTO {TABLE}_{table} (contract, {COLUMNS[table]}) "
            f"SELECT ?, * FROM unnest({arrays}) {_CONFLICTS.get(table, '')}",
            *map(list, zip(*rows, strict=True)),
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One transaction of the leader, or none.

        Raises:
            StandbyError: another leader leads.
            MeasurementError: nothing was stored; or, if `lost`, it is not known.
        """
        with self._guarded():
            if self.lost:
                raise StandbyError(f"{self.name}: another leader may lead {self._contract} now")
            complete = False
            try:
                with self._db.transaction():
                    before = self._lease.fence(self._db)
                    self._in_transaction = True
                    yield
                    complete = True
            except psycopg.Error:
                # the answer to COMMIT is lost: only what the database has can be gone by
                if complete:
                    self._unsure = True
                    self._lease.abandon()
                raise
            finally:
                self._in_transaction = False
            self._lease.renewed(before)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Serialise access, by a connection that is open; errors become a MeasurementError."""
        with self._lock:
            try:
                if self._db.closed:
                    self._db = self._database.connect()
                    self._lease.name_session(self._db)
                yield
            except (psycopg.Error, ValueError) as error:
                text = str(error)
                if isinstance(error, psycopg.Error):
                    text = self._database.message(error)
                    if error.sqlstate is None:  # of the client: the connection is of no use
                        self._db.close()
                raise MeasurementError(
                    f"{self.name} cannot be used: {text}",
                    hint="nothing is lost, and the write is retried",
                ) from None


class Lease:
    """The lead of a contract, taken at once and renewed by a thread until `end`.

    Args:
        connect: opens a connection to the database.
        leader: how messages name this leader.
        lease_s: how long the lead lasts without a renewal.

    Raises:
        StandbyError: another leader leads.
        psycopg.Error: the database cannot be used.
    """

    def __init__(
        self, connect: Callable[[], psycopg.Connection], contract: str, leader: str, lease_s: float
    ) -> None:
        self._connect, self._lease_s = connect, lease_s
        self._row: dict[str, str | int] = {
            "contract": contract,
            "leader": leader,
            "lease": f"{lease_s} seconds",
        }
        self._ended = threading.Event()
        self.lost = False
        self._db: psycopg.Connection | None = connect()
        try:
            before = time.monotonic()
            taken = self._taken(self._db)
        except BaseException:
            self._db.close()
            raise
        self.term = self._row["term"] = taken
        self.name_session(self._db)
        self._until = before + lease_s  # monotonic seconds
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Whether no other leader can have taken the lead."""
        return not self.lost and time.monotonic() < self._until

    def name_session(self, db: psycopg.Connection) -> None:
        """Name a session of the lead, so that the next leader can end it."""
        db.execute(_NAME, (self._row["contract"], self.term))

    def fence(self, db: psycopg.Connection) -> float:
        """Renew the lease in a transaction; what `renewed` takes after its commit.

        Raises:
            StandbyError: another leader leads; nothing of the transaction may be stored.
        """
        before = time.monotonic()
        if db.execute(_RENEW, self._row).rowcount != 1:
            self.lost = True
            raise StandbyError(self.loss(db))
        return before

    def renewed(self, before: float) -> None:
        self._until = max(self._until, before + self._lease_s)

    def loss(self, db: psycopg.Connection) -> str:
        found = db.execute(_HELD, (self._row["contract"],)).fetchone()
        return f"{found[0] if found else 'another leader'} leads {self._row['contract']} now"

    def abandon(self) -> None:
        """Renew it no more."""
        self.lost = True
        self._ended.set()

    def end(self) -> None:
        """Let another leader lead at once."""
        self._ended.set()
        self._thread.join()
        with suppress(psycopg.Error, MeasurementError):
            if self._db is None or self._db.closed:
                self._db = self._connect()
            self._db.execute(_END, (self._row["contract"], self.term))
        self.lost = True
        if self._db is not None:
            self._db.close()

    def _taken(self, db: psycopg.Connection) -> int:
        db.execute("SELECT set_config('lock_timeout', %s, false)", (f"{_LOCK_S}s",))
        contract = self._row["contract"]
        try:
            found = db.execute(_TAKE, self._row).fetchone()
        except psycopg.errors.LockNotAvailable:
            # its term is over, so that a transaction that is not complete may be undone
            if (expired := db.execute(_EXPIRED, (contract,)).fetchone()) is not None:
                db.execute(_TERMINATE, (contract, expired[0]))
            raise StandbyError(f"another leader of {contract} is storing a change") from None
        if found is not None:
            return int(found[0])
        held = db.execute(_HELD, (contract,)).fetchone()
        leader, left_s = held if held is not None else ("another leader", 0.0)
        raise StandbyError(
            f"{leader} leads {contract}, for {max(0.0, float(left_s)):.1f} s without a renewal",
            hint="this one takes over when that one is gone",
        )

    def _renew(self) -> None:
        pause_s = self._lease_s / 3
        while not self._ended.wait(pause_s) and not self.lost:
            try:
                if self._db is None or self._db.closed:
                    self._db = self._connect()
                    self.name_session(self._db)
                before = time.monotonic()
                if self._db.execute(_RENEW, self._row).rowcount != 1:
                    self.lost = True
                    return
                self.renewed(before)
                pause_s = self._lease_s / 3
            except (psycopg.Error, MeasurementError):
                # the lease may outlive the disturbance; when it has ended, `holds` is false
                pause_s = self._lease_s / 10
                with suppress(psycopg.Error):
                    if self._db is not None:
                        self._db.close()
