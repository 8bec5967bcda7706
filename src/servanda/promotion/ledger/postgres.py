# A ledger in a PostgreSQL database: for several machines.  psycopg 3, of the extra [postgres].
#
# Writers need only SELECT and INSERT.  They queue on an advisory lock, so that seq has no gaps (a
# server sequence would have gaps after rollbacks).

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from servanda.promotion.ledger.entry import Damaged, LedgerError
from servanda.promotion.ledger.store import META, PATIENCE_S, TABLE, Queries
from servanda.promotion.sql.postgres import Database, fetched, lost

LINE = 0x5365727661  # the advisory lock of all writers of one database
_REFUSE = f"{TABLE}_refuse"
_LAYOUT = (
    f"CREATE TABLE {META} (name text PRIMARY KEY, value text NOT NULL)",
    f"CREATE TABLE {TABLE} (seq bigint PRIMARY KEY, run text NOT NULL, n bigint NOT NULL, "
    "at double precision NOT NULL, actor text NOT NULL, kind text NOT NULL, "
    "body text NOT NULL, prev text NOT NULL, hash text NOT NULL, UNIQUE (run, n))",
    f"CREATE FUNCTION {_REFUSE}() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'a ledger is append-only'; END $$",
    *(
        statement
        for table in (META, TABLE)
        for statement in (
            f"CREATE TRIGGER {table}_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {_REFUSE}()",
            # replication's sessions too
            f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_kept",
        )
    ),
    # otherwise each page sorts the whole run
    f"CREATE INDEX {TABLE}_run ON {TABLE} (run, seq)",
)


class PostgresStore(Queries):
    """A ledger in a PostgreSQL database: for several machines.

    Args:
        url: postgresql://[user[:password]@]host[:port]/database[?options], as of libpq.
        mark: mark of the key, stored when a ledger is created.
        create: whether to create a missing ledger.

    Raises:
        Foreign: there is no ledger.
        LedgerError: the server cannot be reached or refuses.
    """

    tables = _LAYOUT

    def __init__(self, url: str, mark: str, *, create: bool) -> None:
        self._database = Database(
            url, "ledger", LedgerError, patience_s=PATIENCE_S, idle_s=PATIENCE_S / 2
        )
        self.name, self._db = self._database.name, self._database.connect()
        self._in_transaction = False
        # each statement after the lock sees earlier commits
        self._db.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            if not self.recognised(create):
                self.create(mark)
        except BaseException:
            self._db.close()
            raise

    def begun(self) -> bool:
        # not by to_regclass: after waiting for the lock its cache is out of date
        query = "SELECT 1 FROM pg_catalog.pg_class WHERE relname = ? AND pg_table_is_visible(oid)"
        return bool(self._all(query, META))

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._refuse_closed()
        try:
            with self._db.transaction():
                self._database.settle(self._db, local=True)
                self._db.execute("SELECT pg_advisory_xact_lock(%s)", (LINE,))
                self._in_transaction = True
                yield
        except psycopg.Error as error:
            raise self._translated(error, writing=True) from None
        finally:
            self._in_transaction = False

    def faults(self) -> Iterator[str]:
        query = (
            "SELECT tgname FROM pg_trigger WHERE tgrelid = to_regclass(?) AND tgenabled = 'A' "
            "AND NOT tgisinternal"
        )
        for table in (META, TABLE):
            if (f"{table}_kept",) not in self._all(query, table):
                yield f"the trigger that keeps {table} from being changed is gone or disabled"

    def close(self) -> None:
        self._db.close()

    def _all(self, query: str, *values: object) -> list[tuple]:
        self._refuse_closed()
        try:
            return fetched(self._db, query, *values)
        except psycopg.Error as error:
            if self._in_transaction:
                raise  # `writing` translates it: it knows whether the entries may be stored
            raise self._translated(error) from None

    def _refuse_closed(self) -> None:
        if self._db.closed:
            raise LedgerError(
                f"the connection to {self.name} is closed", hint="open the ledger again"
            )

    def _translated(self, error: psycopg.Error, *, writing: bool = False) -> LedgerError:
        text, state = self._database.message(error), error.sqlstate or ""
        if lost(self._db, error):
            what = f"the connection to {self.name} was lost"
            if not writing:
                return LedgerError(f"{what}: {text}", hint="open the ledger again")
            return LedgerError(
                f"{what}; it is not known whether the entry was kept; read the run again",
                hint=f"open the ledger again; the server said: {text}",
            )
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return LedgerError(
                f"{self.name}: another process has been writing for {PATIENCE_S} s",
                hint="wait for it, or stop it; nothing was written",
            )
        if state.startswith(("XX", "42P01", "42703")):
            return Damaged(f"{self.name} is damaged: {text}", hint="restore a copy")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            hint = (
                "the role needs SELECT and INSERT on the tables, and CREATE to begin a ledger; "
                "?options=-csearch_path%3DNAME in the URL names a schema"
            )
            return LedgerError(f"{self.name}: {text}", hint=hint)
        return LedgerError(f"{self.name}: {text}", hint="nothing was written" if writing else "")
