# Verification: all problems of a ledger, each with its place.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from servanda.promotion.ledger.entry import Damaged, Row
from servanda.promotion.ledger.hash_chain import FIRST, UNLIKE, Chain
from servanda.promotion.ledger.ledger import Ledger, other_key, unchecked
from servanda.promotion.ledger.store import Store
from servanda.promotion.ledger.witness import missing

_STEP = 500  # entries that are tried one by one after a damaged page


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        seq: number of the entry; None for the whole ledger.
        run: run of the entry as stored; "" if unknown.
    """

    seq: int | None
    run: str
    what: str

    def __str__(self) -> str:
        place = "" if self.seq is None else f"entry {self.seq}"
        place += f" of run {self.run!r}" if self.run else ""
        return f"{place}: {self.what}" if place else self.what


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Args:
        entries: number of readable entries.
        head: hash of the last of them; zeros if there is none.
    """

    entries: int
    head: str
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(ledger: Ledger) -> Verified:
    """Read all entries and check hashes, order and the head checkpoint.

    Without a key, only the head checkpoint detects a chain that was recomputed from some entry on;
    see docs/how-to/ledger.md.

    Raises:
        LedgerError: the store cannot be reached, or the head checkpoint cannot be read.
    """
    head = ledger.witness.head()  # before the ledger is read: it may grow meanwhile
    end = max(head.seq if head else 0, _end(ledger.store))
    chain = Chain(ledger.key)
    problems: list[Problem] = []
    entries, last, unlike = 0, FIRST, 0
    for seq, row in _rows(ledger.store, end):
        if isinstance(row, str):
            problems.append(Problem(seq, "", f"it cannot be read: {row}"))
            chain.lost(seq)
            continue
        faults = chain.faults(row)
        unlike += len(faults) == 1 and faults[0].startswith(UNLIKE)
        problems += [Problem(row.seq, row.run, fault) for fault in faults]
        entries, last = entries + 1, row.hash
    if unlike == entries == len(problems) > 1:
        what = f"none of the {entries} entries has its hash under this key: the key is wrong"
        problems = [Problem(None, "", what)]
    problems += [Problem(None, "", fault) for fault in ledger.store.faults()]
    try:
        fault = missing(head, ledger.store) if head else ""
    except Damaged:
        fault = ""  # reported above as an unreadable entry
    if fault:
        problems.append(Problem(None, "", fault))
    return Verified(entries, str(last), tuple(problems))


def verify_at(where: str, *, witness: Path | None = None, key: bytes = b"") -> Verified:
    """Verify the ledger at a location, even one that is too damaged to be opened.

    Args: see `open_ledger`.

    Raises:
        LedgerError: there is no ledger, or it cannot be reached.
    """
    try:
        ledger = unchecked(where, witness, key, reading=True)
    except Damaged as error:
        return Verified(0, FIRST, (Problem(None, "", error.problems[0].message),))
    with ledger:
        result = verify(ledger)
        refusal = other_key(ledger)
    if refusal:
        return Verified(result.entries, result.head, (Problem(None, "", refusal), *result.problems))
    return result


def _end(store: Store) -> int:
    """seq of the last entry, if the store can find it."""
    try:
        last = store.last()
    except Damaged:
        return 0
    return last.seq if last and type(last.seq) is int else 0


def _rows(store: Store, end: int) -> Iterator[tuple[int, Row | str]]:
    """Every readable row, and the error of each other; near a damaged page one by one."""
    at = 0
    while True:
        try:
            page = store.page(None, at, max(end, at + _STEP))
        except Damaged as error:
            rows = _singly(store, at + 1, at + _STEP, end)
            if not rows and at < max(end, 1):
                rows = [(at + 1, error.problems[0].message)]
            yield from rows
            at += _STEP
            if at >= end and not any(isinstance(row, Row) for _, row in rows):
                return
            continue
        if not page:
            return
        yield from ((row.seq, row) for row in page)
        at = max(at + 1, *(row.seq for row in page))


def _singly(store: Store, first: int, last: int, end: int) -> list[tuple[int, Row | str]]:
    """Rows by their seq, and the error of each missing one up to `end`."""
    rows: list[tuple[int, Row | str]] = []
    for seq in range(first, last + 1):
        try:
            row = store.at(seq) or "it is not found, and its neighbours are damaged"
        except Damaged as error:
            row = error.problems[0].message
        if isinstance(row, Row) or seq <= end:
            rows.append((seq, row))
    return rows
