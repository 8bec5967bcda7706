# The store of a controller in a PostgreSQL database, for several leaders of which one leads.
# psycopg 3, of the extra [postgres].
#
# Every table has the name of the contract as its first column, so that one database may hold many.

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from servanda.errors import MeasurementError
from servanda.gateway.controller.intake import Start
from servanda.gateway.controller.lease import LAYOUT, TABLE, Lease
from servanda.gateway.controller.store import (
    ANEW,
    CLEANED_EVERY,
    SAMPLES,
    SAMPLES_S,
    SEEDS,
    STARTS,
    Commit,
    StandbyError,
)
from servanda.promotion.ledger.database import Database

_PATIENCE_S = 10  # for a connection that is silent, and for another process that creates the tables
_CREATING = 0x5365727662  # the advisory lock of their creation
_SCHEMA = 1
_TABLES = (
    LAYOUT,
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


class PostgresStore:
    """See `Store`.

    Args:
        url: postgresql://[user[:password]@]host[:port]/database[?options], as of libpq.
        contract: its name; leader: how messages name this leader.
        lease_s: how long this leader keeps the lead when it is gone.

    Raises:
        StandbyError: another leader leads.
        MeasurementError: the database cannot be used.
    """

    def __init__(self, url: str, contract: str, leader: str, lease_s: float) -> None:
        self._database = Database(
            url, "state", MeasurementError, patience_s=_PATIENCE_S, idle_s=lease_s
        )
        self.name, self._contract = self._database.name, contract
        self._lease_s, self._lock = lease_s, RLock()
        self._unsure, self._commits = False, 0
        self._db = self._connect()
        try:
            with self._guarded():
                self._create()
                self._lease = Lease(self._connect, contract, leader, lease_s)
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

    def meta(self, name: str) -> Any:
        rows = self._rows(f"SELECT value FROM {TABLE}_meta WHERE contract = %s AND name = %s", name)
        return json.loads(rows[0][0]) if rows else None

    def taken(self) -> dict[Start, int]:
        query = f"SELECT gateway, start, number FROM {TABLE}_taken WHERE contract = %s ORDER BY n"
        return {(gateway, start): number for gateway, start, number in self._rows(query)}

    def seeds(self) -> tuple[int, ...]:
        query = f"SELECT seed FROM {TABLE}_seeds WHERE contract = %s ORDER BY id"
        return tuple(int(seed) for (seed,) in self._rows(query))

    def outbox(self, most: int = 256) -> dict[int, Any]:
        query = f"SELECT n, record FROM {TABLE}_outbox WHERE contract = %s ORDER BY n LIMIT %s"
        return {n: json.loads(record) for n, record in self._rows(query, most)}

    def behind(self) -> int:
        return self._rows(f"SELECT count(*) FROM {TABLE}_outbox WHERE contract = %s")[0][0]

    def commit(self, commit: Commit) -> None:
        meta = [(name, json.dumps(value)) for name, value in commit.meta.items()]
        outbox = [(n, json.dumps(record)) for n, record in commit.outbox.items()]
        taken = [(*start, number) for start, number in commit.taken.items()]
        samples = [tuple(vars(sample).values()) for sample in commit.samples]
        seeds = [(str(seed),) for seed in commit.seeds]
        with self._writing():
            self._add(
                "meta (contract, name, value)",
                "text, text",
                meta,
                "ON CONFLICT (contract, name) DO UPDATE SET value = excluded.value",
            )
            self._add(
                "taken (contract, gateway, start, number)",
                "text, double precision, bigint",
                taken,
                "ON CONFLICT (contract, gateway, start) "
                "DO UPDATE SET number = excluded.number, n = excluded.n",
            )
            self._add("outbox (contract, n, record)", "bigint, text", outbox)
            self._add(
                "samples (contract, at, slice, clause, total, tokens, missing, chance, key)",
                "double precision, text, text, double precision, bigint, bigint, "
                "double precision, text",
                samples,
            )
            self._add("seeds (contract, seed)", "text", seeds)
            if self._commits % CLEANED_EVERY == 0:
                self._sweep()
        self._commits += 1

    def delete_outbox(self, until: int) -> None:
        with self._writing():
            self._all(f"DELETE FROM {TABLE}_outbox WHERE contract = %s AND n <= %s", until)

    def check_present(self) -> None:
        """A table that is gone is an error of the statement that needs it."""

    def renew(self, commit: Commit) -> None:
        self.commit(commit)

    def close(self) -> None:
        self._lease.end()
        with self._lock, suppress(psycopg.Error):
            self._db.close()

    def _connect(self) -> psycopg.Connection:
        db = self._database.connect()
        try:
            db.execute("SELECT set_config('lock_timeout', %s, false)", (f"{_PATIENCE_S}s",))
            # what was stored is acknowledged to gateways
            db.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        except BaseException:
            db.close()
            raise
        return db

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

    def _sweep(self) -> None:
        """Delete data that is too old or beyond the limits."""
        self._all(
            f"DELETE FROM {TABLE}_samples WHERE contract = %s "
            f"AND at < (SELECT max(at) FROM {TABLE}_samples WHERE contract = %s) - %s",
            self._contract,
            SAMPLES_S,
        )
        for table, column, most in (
            ("samples", "id", SAMPLES),
            ("seeds", "id", SEEDS),
            ("taken", "n", STARTS),
        ):
            self._all(
                f"DELETE FROM {TABLE}_{table} WHERE contract = %s AND {column} <= "
                f"(SELECT {column} FROM {TABLE}_{table} WHERE contract = %s "
                f"ORDER BY {column} DESC OFFSET %s LIMIT 1)",
                self._contract,
                most,
            )

    def _add(
        self, into: str, types: str, rows: Sequence[tuple[Any, ...]], conflict: str = ""
    ) -> None:
        """Insert rows in their order, by one statement."""
        if rows:
            arrays = ", ".join(f"%s::{kind}[]" for kind in types.split(", "))
            self._all(
                f"INSERT INTO {TABLE}_{into} SELECT %s, * FROM unnest({arrays}) {conflict}",
                *map(list, zip(*rows, strict=True)),
            )

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._guarded():
            return self._all(query, *values)

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._db.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(query.encode(), (self._contract, *values))
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def _writing(self) -> Iterator[None]:
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
                    yield
                    complete = True
            except psycopg.Error:
                # the answer to COMMIT is lost: only what the database has can be gone by
                if complete:
                    self._unsure = True
                    self._lease.abandon()
                raise
            self._lease.renewed(before)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Serialise access, by a connection that is open; errors become a MeasurementError."""
        with self._lock:
            try:
                if self._db.closed:
                    self._db = self._connect()
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
