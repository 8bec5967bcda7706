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

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any

import psycopg

from servanda.errors import MeasurementError
from servanda.gateway.controller.store import ANEW, COLUMNS, StandbyError, Store
from servanda.promotion.sql.postgres import Database, fetched

TABLE = "servanda_leader"
_PATIENCE_S = 10  # for a connection that is silent, and for another process that creates the tables
_CREATING = 0x5365727662  # the advisory lock of their creation
_SCHEMA = 1
_TABLES = (
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
            url, "state", MeasurementError, patience_s=_PATIENCE_S, idle_s=lease_s
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
                MeasurementError.refuse_form(self.name, found[0], _SCHEMA, ANEW)
                return
            for statement in _TABLES:
                self._db.execute(statement.encode())
            self._db.execute(f"INSERT INTO {TABLE}_layout VALUES (%s)", (_SCHEMA,))

    def _rows_of(self, table: str) -> str:
        return f"{TABLE}_{table} WHERE contract = ?"

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        # in a transaction `_changing` guards it, which opens no other connection; the lock comes
        # first, for the transaction may be another thread's
        with self._lock, nullcontext() if self._in_transaction else self._guarded():
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
