# The entries of a ledger, and its errors.
#
# seq counts the entries of the whole ledger from 1, n those of one run from 1; neither has gaps.
# `at` is in unix seconds.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

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
