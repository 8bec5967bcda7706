# The entries of a ledger, and its errors.
#
# seq counts the entries of the whole ledger from 1, n those of one run from 1; neither has gaps.
# `at` is in unix seconds.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from servanda.errors import EvidenceError, ServandaError

B = TypeVar("B")  # of a body


class LedgerError(ServandaError):
    """The ledger cannot be reached, read or written."""


class Damaged(LedgerError):  # noqa: N818 - what the ledger is
    """The ledger was altered: edited, truncated, or damaged by a disk."""


class Outrun(EvidenceError):  # noqa: N818 - what became of the writer
    """Another process appended to the run since it was read: read it again and decide again."""


@dataclass(frozen=True)
class Record:
    """A record to append.

    Args:
        kind: of the entry, such as "advanced".
        actor: the person or program that decided.
        at: unix seconds.
        body: plain JSON data without NaN and infinity; keys are strings.
    """

    kind: str
    actor: str
    at: float
    body: Mapping[str, Any]


@dataclass(frozen=True)
class _Placed(Generic[B]):
    """A record with its position.

    Args:
        seq: number in the ledger; n: number in its run; both from 1.
        prev: hash of the entry before it in the ledger.
        hash: hash of all other fields, 16 bytes in hex.
    """

    seq: int
    run: str
    n: int
    at: float
    actor: str
    kind: str
    body: B
    prev: str
    hash: str


class Entry(_Placed[Mapping[str, Any]]):
    """A record with its position, whose hash was verified."""


class Row(_Placed[str]):
    """An entry as stored: `body` is canonical text; nothing is verified yet."""


COLUMNS = tuple(field.name for field in fields(Row))


class Ledger(Protocol):
    """An append-only sequence of entries; the current state is derived from them."""

    def append(self, run: str, records: Sequence[Record], *, after: int) -> tuple[Entry, ...]:
        """Append records after a run's last entry: all or none, durable on return.

        Args:
            after: n of the run's last entry that the caller has seen; 0 for a new run.

        Raises:
            Outrun: the run has later entries.
            LedgerError: it cannot be written; if the connection was lost meanwhile, only reading
                the run shows whether it was.
        """
        ...

    def entries(self, run: str | None = None, *, since: int = 0) -> Iterator[Entry]:
        """The entries with seq > `since`, of one run or of all, in order.

        Raises:
            Damaged: an entry was altered.
        """
        ...

    def runs(self) -> tuple[str, ...]:
        """The names of the runs, oldest first."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Ledger: ...

    def __exit__(self, *_: object) -> None: ...
