# What a place for entries does.  It knows rows and transactions, and nothing of hashes.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from servanda.promotion.ledger.entry import LedgerError, Row

SCHEMA = "1"
PATIENCE_S = 30  # for whoever else is writing


class Foreign(LedgerError):  # noqa: N818 - what is there
    """Something else is in the place of the ledger, or nothing is."""


class Store(Protocol):
    """Rows in one place.  Its methods raise LedgerError; Damaged where what is there is broken."""

    name: str  # of the place, for messages; no password is in it

    def marks(self) -> Mapping[str, str]:
        """What was written when the ledger was begun: `schema`, and `mark` of its key."""
        ...

    def page(self, run: str | None, since: int, until: int) -> list[Row]:
        """Some rows with since < seq <= until in order; none only where there are no more."""
        ...

    def at(self, seq: int) -> Row | None: ...

    def last(self, run: str | None = None) -> Row | None:
        """Of one run or of all."""
        ...

    def runs(self) -> tuple[str, ...]: ...

    def writing(self) -> AbstractContextManager[None]:
        """One transaction, and no other writer in it; durable once it is left without an error."""
        ...

    def insert(self, rows: Sequence[Row]) -> None: ...

    def faults(self) -> Iterator[str]:
        """What the store itself finds wrong: pages, indexes, triggers that are gone."""
        ...

    def close(self) -> None: ...


def refuse_schema(name: str, found: str | None) -> None:
    """A ledger that another version laid out is not touched."""
    if found is not None and found.isdecimal() and int(found) > int(SCHEMA):
        raise LedgerError(
            f"{name} is a ledger of schema {found}, and this servanda knows {SCHEMA}",
            hint="use the servanda that wrote it, or a newer one: pip install --upgrade servanda",
        )
