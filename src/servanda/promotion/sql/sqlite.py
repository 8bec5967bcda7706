# An SQLite file: how it is opened, read and written; its owner names the errors.
#
# WAL with synchronous=FULL: a returned commit survives a power cut; readers never wait.

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from servanda.errors import ServandaError

T = TypeVar("T")

# a damaged file also makes SQLite quote invalid text, or request too much memory
FAILURES = (sqlite3.Error, UnicodeError, MemoryError)


class SqliteFile(ABC):
    """One connection to a file at `path`; a store inherits it."""

    path: Path
    _db: sqlite3.Connection

    @abstractmethod
    def _failure(self, error: Exception, *, committing: bool = False) -> ServandaError:
        """An exception of SQLite as an error of the store.

        Args:
            committing: raised by COMMIT.
        """

    def _connect(
        self, patience_s: float, how: str = "mode=rwc", *, any_thread: bool = False
    ) -> sqlite3.Connection:
        """A connection that commits each statement, outside of `writing`.

        Args:
            patience_s: timeout for another process.
            how: options of SQLite's URI.
            any_thread: the caller locks it, and uses it in several threads.
        """
        uri = f"{self.path.absolute().as_uri()}?{how}"
        return self._run(
            lambda: sqlite3.connect(
                uri,
                uri=True,
                timeout=patience_s,
                isolation_level=None,
                check_same_thread=not any_thread,
            )
        )

    def _log_ahead(self) -> None:
        """Write through WAL; SQLite does not wait for another process that changes the mode."""
        if self._one("PRAGMA journal_mode") != "wal":
            self._one("PRAGMA journal_mode = wal")
        self._one("PRAGMA synchronous = full")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction of the only writer: all of it is stored, or nothing."""
        self._one("BEGIN IMMEDIATE")
        committing = False
        try:
            yield
            committing = True
            self._db.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            if isinstance(error, FAILURES):
                raise self._failure(error, committing=committing) from None
            raise

    def _one(self, query: str) -> Any:
        row = self._run(lambda: self._db.execute(query).fetchone())
        return row[0] if row else None

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._run(lambda: self._db.execute(query, values).fetchall())

    def _many(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._run(lambda: self._db.executemany(query, rows))

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except FAILURES as error:
            raise self._failure(error) from None

    def close(self) -> None:
        self._db.close()
