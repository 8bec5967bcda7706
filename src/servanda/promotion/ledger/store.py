# The interface of stores for entries: rows and transactions, without hashes.  Queries that both SQL
# stores share are in their common SQL.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from servanda.promotion.ledger.entry import COLUMNS, Damaged, LedgerError, Row
from servanda.promotion.ledger.migrations import Migrations, pending

PATIENCE_S = 30  # timeout for another writer


class Foreign(LedgerError):  # noqa: N818 - what is there
    """The location has no ledger."""


class Store(Protocol):
    """Stored rows.  Its methods raise LedgerError, or Damaged if the store is damaged."""

    name: str  # the location for messages, without a password

    def marks(self) -> Mapping[str, str]:
        """The data from the creation of the ledger: `schema`, and `mark` of its key."""
        ...

    def page(self, run: str | None, since: int, until: int) -> list[Row]:
        """Some rows with since < seq <= until in order; empty only if there are no more."""
        ...

    def at(self, seq: int) -> Row | None: ...

    def last(self, run: str | None = None) -> Row | None:
        """The last row of one run or of all."""
        ...

    def runs(self) -> tuple[str, ...]: ...

    def refuse_newer(self) -> None:
        """Refuse a ledger of a newer schema."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """An exclusive write transaction; durable once it is left without an error."""
        ...

    def insert(self, rows: Sequence[Row]) -> None: ...

    def faults(self) -> Iterator[str]:
        """The faults that the store finds: in pages and indexes, and missing triggers."""
        ...

    def close(self) -> None: ...


TABLE, META = "servanda_ledger", "servanda_ledger_meta"
_COLUMNS = ", ".join(COLUMNS)
_PAGE = 500


class Queries(ABC):
    """The reading half of a `Store` over SQL, and its migrations.

    A store defines the placeholder of a value (`hole`), its migrations, what opens and closes the
    append-only META for a new schema, and runs the queries.
    """

    name: str
    hole: ClassVar[str]
    migrations: ClassVar[Migrations]
    unlock: ClassVar[tuple[str, str]]

    @abstractmethod
    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def begun(self) -> bool:
        """Whether there are tables of a ledger."""

    @abstractmethod
    def faults(self) -> Iterator[str]: ...

    def schema(self) -> int:
        """The stored schema; 0 for none.  A mark that was altered is found by its hash alone."""
        if not self.begun():
            return 0
        stored = self.marks().get("schema", "")
        return int(stored) if stored.isdecimal() else len(self.migrations)

    def refuse_newer(self) -> None:
        pending(self.name, self.schema(), self.migrations, LedgerError)

    def migrate(self, mark: str) -> None:
        """Create the tables, or upgrade those of an older schema; within `writing`.

        Raises:
            Damaged: they are not those of their schema; nothing is changed.
        """
        schema, newest = self.schema(), len(self.migrations)
        statements = pending(self.name, schema, self.migrations, LedgerError)
        if not statements:
            return
        for fault in self.faults() if schema else ():
            raise Damaged(
                f"{self.name} is not upgraded from schema {schema} to {newest}: {fault}",
                hint="`servanda promotion ledger verify` lists what was altered; restore a copy",
            )
        for statement in statements:
            self._all(statement)
        if schema:
            unlock, lock = self.unlock
            self._all(unlock)
            self._all(f"UPDATE {META} SET value = {self.hole} WHERE name = 'schema'", str(newest))
            self._all(lock)
            return
        for pair in (("schema", str(newest)), ("mark", mark)):
            self._all(f"INSERT INTO {META} VALUES ({self.hole}, {self.hole})", *pair)

    def marks(self) -> Mapping[str, str]:
        return dict(self._all(f"SELECT name, value FROM {META}"))

    def page(self, run: str | None, since: int, until: int) -> list[Row]:
        of_run, values = ("", ()) if run is None else (f"run = {self.hole} AND ", (run,))
        return self._rows(
            f"WHERE {of_run}seq > {self.hole} AND seq <= {self.hole} ORDER BY seq LIMIT {_PAGE}",
            *values,
            since,
            until,
        )

    def at(self, seq: int) -> Row | None:
        return next(iter(self._rows(f"WHERE seq = {self.hole}", seq)), None)

    def last(self, run: str | None = None) -> Row | None:
        if run is None:
            rows = self._rows("ORDER BY seq DESC LIMIT 1")
        else:
            rows = self._rows(f"WHERE run = {self.hole} ORDER BY n DESC LIMIT 1", run)
        return next(iter(rows), None)

    def runs(self) -> tuple[str, ...]:
        rows = self._all(f"SELECT run FROM {TABLE} GROUP BY run ORDER BY min(seq)")
        return tuple(run for (run,) in rows)

    def _rows(self, which: str, *values: object) -> list[Row]:
        return [Row(*row) for row in self._all(f"SELECT {_COLUMNS} FROM {TABLE} {which}", *values)]
