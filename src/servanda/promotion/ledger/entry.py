# What a ledger holds, and what may go wrong with one.
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
    """What is there is not what was written: edited, truncated, or a broken disk."""


class Outrun(EvidenceError):  # noqa: N818 - what became of the writer
    """Somebody else appended to the run since it was read: read it again, and decide again."""


@dataclass(frozen=True)
class Record:
    """Something to be written down.

    Args:
        kind: of the entry, such as "advanced".
        actor: who decided.
        at: when, unix seconds.
        body: plain data of JSON; no NaN, no infinity, keys are texts.
    """

    kind: str
    actor: str
    at: float
    body: Mapping[str, Any]


@dataclass(frozen=True)
class _Placed(Generic[B]):
    """A record in its place.

    Args:
        seq: place in the ledger; n: place in its run; both from 1.
        prev: hash of the entry before it in the ledger.
        hash: of everything else in it, 16 bytes in hex.
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
    """A record in its place, whose hash was found right."""


class Row(_Placed[str]):
    """An entry as a store keeps it: `body` is canonical text, and nothing is checked yet."""


COLUMNS = tuple(field.name for field in fields(Row))


class Ledger(Protocol):
    """Entries, appended and never changed.  Whatever holds now is derived from them."""

    def append(self, run: str, records: Sequence[Record], *, after: int) -> tuple[Entry, ...]:
        """Write records behind a run's last entry: all of them or none, durable on return.

        Args:
            after: n of the run's last entry that the caller has seen; 0 for a new run.

        Raises:
            Outrun: the run has later entries.
            LedgerError: it cannot be written; where the connection was lost meanwhile, the
                text says that the run has to be read to know.
        """
        ...

    def entries(self, run: str | None = None, *, since: int = 0) -> Iterator[Entry]:
        """Those with seq > `since`, of one run or of all, in order.

        Raises:
            Damaged: an entry is not what was written.
        """
        ...

    def runs(self) -> tuple[str, ...]:
        """Names, in the order in which they began."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Ledger: ...

    def __exit__(self, *_: object) -> None: ...
