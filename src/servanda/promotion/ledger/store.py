# Stores for entries: rows and transactions, without hashes.  Queries that both SQL stores share are
# in their common SQL.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any, ClassVar

from servanda.promotion.ledger.entry import COLUMNS, LedgerError, Row

PATIENCE_S = 30  # timeout for another writer
ABSENT = "pass --ledger, or start one with `servanda promote`"  # the next move


class Foreign(LedgerError):  # noqa: N818 - what is there
    """The location has no ledger."""


TABLE, META = "servanda_ledger", "servanda_ledger_meta"
SCHEMA = 2  # of the tables
_COLUMNS = ", ".join(COLUMNS)
_PAGE = 500


class Queries(ABC):
    """Stored rows; the half of a store that is the same in every SQL database.

    A store defines the statements that create its tables (`tables`), and runs the queries, whose
    values stand at each `?`.  Its methods raise LedgerError, or Damaged if the store is damaged.
    """

    name: str  # the location for messages, without a password
    tables: ClassVar[Sequence[str]]

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """An exclusive write transaction; durable once it is left without an error."""

    @abstractmethod
    def faults(self) -> Iterator[str]:
        """The faults that the store finds: in pages and indexes, and missing triggers."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def begun(self) -> bool:
        """Whether there are tables of a ledger."""

    def recognised(self, create: bool) -> bool:
        """Whether there is a ledger; if not, it may be created.

        Raises:
            Foreign: there is none, and it may not be.
        """
        begun = self.begun()
        if not begun and not create:
            raise Foreign(f"no ledger at {self.name}", hint=ABSENT)
        return begun

    def create(self, mark: str) -> None:
        """Create the tables, unless another process has done so."""
        with self.writing():
            if self.begun():
                return
            for statement in self.tables:
                self._all(statement)
            for pair in (("schema", str(SCHEMA)), ("mark", mark)):
                self._all(f"INSERT INTO {META} VALUES (?, ?)", *pair)

    def insert(self, rows: Sequence[Row]) -> None:
        query = f"INSERT INTO {TABLE} VALUES ({', '.join('?' * len(COLUMNS))})"
        for row in rows:
            self._all(query, *astuple(row))

    def marks(self) -> Mapping[str, str]:
        """The data from the creation of the ledger: `schema`, and `mark` of its key."""
        return dict(self._all(f"SELECT name, value FROM {META}"))

    def page(self, run: str | None, since: int, until: int) -> list[Row]:
        """Some rows with since < seq <= until in order; empty only if there are no more."""
        of_run, values = ("", ()) if run is None else ("run = ? AND ", (run,))
        return self._rows(
            f"WHERE {of_run}seq > ? AND seq <= ? ORDER BY seq LIMIT {_PAGE}",
            *values,
            since,
            until,
        )

    def at(self, seq: int) -> Row | None:
        return next(iter(self._rows("WHERE seq = ?", seq)), None)

    def last(self, run: str | None = None) -> Row | None:
        """The last row of one run or of all."""
        if run is None:
            rows = self._rows("ORDER BY seq DESC LIMIT 1")
        else:
            rows = self._rows("WHERE run = ? ORDER BY n DESC LIMIT 1", run)
        return next(iter(rows), None)

    def runs(self) -> tuple[str, ...]:
        rows = self._all(f"SELECT run FROM {TABLE} GROUP BY run ORDER BY min(seq)")
        return tuple(run for (run,) in rows)

    def _rows(self, which: str, *values: object) -> list[Row]:
        return [Row(*row) for row in self._all(f"SELECT {_COLUMNS} FROM {TABLE} {which}", *values)]
