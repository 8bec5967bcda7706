# The entries of a ledger, its errors, and the chain of hashes that links entries.
#
# seq counts the entries of the whole ledger from 1, n those of one run from 1; neither has gaps.
# `at` is in unix seconds.
#
# hash = blake2b, 16 bytes, over the canonical JSON of the entry without its hash: keys sorted,
# no spaces, ASCII, numbers as Python writes them.  `prev` is included, so that a hash covers all
# entries before it too.  Without a key, anyone who can write the ledger can recompute the whole
# chain: then the chain shows only accidents and careless edits.  With a key (blake2b's keyed mode)
# this needs the key.

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
FIRST = "0" * 32  # `prev` of the first entry
UNLIKE = "its content has the hash"  # first words of the fault of an edited entry

_LONGEST_KEY = 64  # of blake2b


def canonical(value: Any) -> str:
    """The canonical JSON text of plain data.

    Raises:
        ValueError, TypeError: not plain JSON data.

    >>> canonical({"b": [1, 2.0], "a": None})
    '{"a":null,"b":[1,2.0]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str, key: bytes = b"") -> str:
    """A hash of 16 bytes in hex, keyed if there is a key."""
    if len(key) > _LONGEST_KEY:
        key = hashlib.blake2b(key).digest()
    return hashlib.blake2b(text.encode(), digest_size=16, key=key).hexdigest()


def line(entry: Entry) -> str:
    """An entry as canonical JSON with its hash."""
    return canonical(vars(entry))


def hash_of(row: Row, key: bytes) -> str:
    """The hash of an entry, over all its other fields.

    Raises:
        ValueError: its body is not JSON, or its numbers are invalid.
    """
    data = vars(row) | {"body": json.loads(row.body)}
    del data["hash"]
    return digest(canonical(data), key)


def sealed(
    last: Row | None, run: str, n: int, records: Sequence[Record], key: bytes
) -> tuple[Row, ...]:
    """Rows for records, each linked to the hash of the one before it.

    Args:
        last: the ledger's last row; None if it is empty.
        n: number of the run's last entry.

    Raises:
        LedgerError: a record is not plain data.
    """
    rows: list[Row] = []
    seq, prev = (last.seq, last.hash) if last else (0, FIRST)
    for i, record in enumerate(records, start=1):
        row = Row(seq + i, run, n + i, *_texts(run, record), prev, "")
        row = replace(row, hash=hash_of(row, key))
        prev = row.hash
        rows.append(row)
    return tuple(rows)


def _texts(run: str, record: Record) -> tuple[float, str, str, str]:
    try:
        for name, text in (("run", run), ("actor", record.actor), ("kind", record.kind)):
            if not isinstance(text, str) or not text:
                raise ValueError(f"its {name} is {text!r}")
            if not text.isprintable():  # not every store returns it unchanged
                raise ValueError(f"its {name} {text!r} has a character that cannot be printed")
        if not math.isfinite(record.at):
            raise ValueError(f"its time is {record.at}")
        _refuse_keys(record.body)
        # some stores return 0.0 for -0.0
        return float(record.at) + 0.0, record.actor, record.kind, canonical(dict(record.body))
    except (ValueError, TypeError, RecursionError) as error:
        raise LedgerError(
            f"a record of kind {record.kind!r} for run {run!r} cannot be kept: {error}",
            hint="a ledger keeps what JSON can hold: texts, finite numbers, lists, mappings",
        ) from None


def _refuse_keys(value: Any) -> None:
    """Refuse keys that are no strings: JSON would convert them."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if not isinstance(name, str):
                raise TypeError(f"the key {name!r} is not text")
            _refuse_keys(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _refuse_keys(part)


def opened(row: Row) -> Entry:
    """A verified row as an entry."""
    return Entry(**vars(row) | {"body": json.loads(row.body)})


class Chain:
    """Checks rows in order and reports the faults of each.

    Args:
        key: key of the hashes.
        since: seq of the entry before the first row.
    """

    def __init__(self, key: bytes, since: int = 0) -> None:
        self._key, self._seq = key, since
        # None: not known
        self._prev: str | None = None if since else FIRST
        self._last: dict[str, int] | None = None if since else {}

    def faults(self, row: Row) -> list[str]:
        """The faults of a row as texts; the row becomes the predecessor either way."""
        faults = _kinds(row)
        if faults:
            self._last = None
        else:
            faults = [*self._place(row), *content(row, self._key)]
        self._seq, self._prev = row.seq, row.hash
        return faults

    def lost(self, seq: int) -> None:
        """Skip an unreadable entry: the next one is not compared with it."""
        self._seq, self._prev, self._last = seq, None, None

    def _place(self, row: Row) -> list[str]:
        faults = []
        if row.seq != self._seq + 1:
            faults.append(_gap(self._seq, row.seq))
        elif self._prev is not None and row.prev != self._prev:
            faults.append(f"it follows hash {row.prev}, and the entry before it has {self._prev}")
        if self._last is not None:
            last = self._last.get(row.run, 0)
            if row.n != last + 1:
                faults.append(f"it is number {row.n} of its run, and the one before was {last}")
            self._last[row.run] = row.n
        return faults


def _gap(last: int, seq: int) -> str:
    if seq <= last:
        return f"it comes after entry {last}"
    missing = f"entry {last + 1} is" if seq == last + 2 else f"entries {last + 1} to {seq - 1} are"
    return f"{missing} missing before it"


def content(row: Row, key: bytes) -> list[str]:
    """The faults of a row on its own, as texts: unreadable fields, or a wrong hash."""
    if faults := _kinds(row):
        return faults
    try:
        same = canonical(json.loads(row.body)) == row.body
        made = hash_of(row, key)
    except (ValueError, RecursionError) as error:
        return [f"it is no JSON: {error}"]
    if made != row.hash:
        return [f"{UNLIKE} {made}, and the recorded hash is {row.hash}"]
    return [] if same else ["its body is not canonical JSON"]


def _kinds(row: Row) -> list[str]:
    """Check types: an edited store may contain any."""
    kinds = (int, str, int, float, str, str, str, str, str)
    for name, kind in zip(COLUMNS, kinds, strict=True):
        if type(getattr(row, name)) is not kind:
            return [f"its {name} cannot be read: it is {getattr(row, name)!r}"]
    return []
