# Exports: a ledger as JSON lines, as a backup that can be verified on its own.
#
# A line is the canonical JSON of one entry with its hash.

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

from servanda.promotion.ledger.entry import COLUMNS, Entry, LedgerError, Row, canonical, line
from servanda.promotion.ledger.store import Foreign

SUFFIX = ".jsonl"


def export(entries: Iterable[Entry], file: TextIO) -> int:
    """Write every entry, one per line; returns the number of entries.

    Raises:
        Damaged: an entry of a ledger was altered; the lines before it are in the file.
    """
    count = 0
    for entry in entries:
        file.write(f"{line(entry)}\n")
        count += 1
    return count


class ExportedStore:
    """An exported file as a read-only store, with the methods of `Queries`.

    Raises:
        Foreign: there is no such file.
        LedgerError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            raise Foreign(
                f"no ledger at {path}",
                hint="pass --ledger with a file that `servanda promotion ledger export` wrote",
            ) from None
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror or error}") from None
        if not lines[-1]:
            lines.pop()
        parsed = [_parsed(data) for data in lines]
        self._rows = [row for row in parsed if isinstance(row, Row)]
        self._broken = [
            f"line {number} of {path} {row}"
            for number, row in enumerate(parsed, start=1)
            if isinstance(row, str)
        ]

    def marks(self) -> Mapping[str, str]:
        return {}

    def page(self, run: str | None, since: int, until: int) -> list[Row]:
        # all at once, in the order of the file: an edited file may have another order
        return [r for r in self._rows if since < r.seq <= until and run in (None, r.run)]

    def at(self, seq: int) -> Row | None:
        return next((row for row in self._rows if row.seq == seq), None)

    def last(self, run: str | None = None) -> Row | None:
        return next((row for row in reversed(self._rows) if run in (None, row.run)), None)

    def runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.run for row in self._rows))

    def writing(self) -> AbstractContextManager[None]:
        raise LedgerError(
            f"{self.name} is an exported ledger, which is read-only",
            hint="give the ledger that it was exported from",
        )

    def insert(self, rows: Sequence[Row]) -> None:
        self.writing()

    def faults(self) -> Iterator[str]:
        return iter(self._broken)

    def close(self) -> None:
        pass


def _parsed(data: bytes) -> Row | str:
    try:
        text = data.decode("ascii")
        entry = json.loads(text)
        if not isinstance(entry, dict) or {*entry} != {*COLUMNS} or type(entry["seq"]) is not int:
            return "is no entry"
        if canonical(entry) != text:
            return "is not canonical JSON"
        entry["body"] = canonical(entry["body"])
        return Row(**entry)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
