# The log of sampled requests, in the form of docs/how-to/traffic.md.
#
# Every start begins a new file, so that half a line which a crash left stays the last of its
# own; numbers go on from those of all files.  Rows are written once a second or so.  While the
# disk takes none they wait, and the file ends at a whole row; what finds no room meanwhile is
# given up row by row, for a log with a gap would be worth nothing.

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from servanda.errors import EvidenceError, MeasurementError

# what stands where nobody could tell the ids of a prompt: no row is without them
NOBODY_KNOWS: Mapping[str, Any] = {"prompt_token_ids": [0], "x-prompt": "unknown"}
_OURS = (
    *("index", "run", "leg", "at", "served", "key"),
    *("x-best", "x-chance", "x-drawn", "x-slices", "x-mirrored", "x-version"),
)
_FILE = re.compile(r"served-([0-9]{4,})\.jsonl")
_AT_ONCE = 1 << 20
_FEW = 16  # rows that are given up for one
WAITING = 64 << 20  # bytes of rows that wait for a disk


def given_up(row: bytes, why: str) -> bytes:
    """A row without anything that came from outside, as lost."""
    known = {name: value for name, value in msgspec.json.decode(row).items() if name in _OURS}
    lost = {**known, "sampling": {"max_new_tokens": 1}, **NOBODY_KNOWS, "lost": why}
    return msgspec.json.encode(lost)


class Log:
    """Rows to a file of a folder, for nobody but its owner to read.

    Args:
        waiting: bytes of rows that may wait for a disk that takes none.

    Attributes:
        sent, logged: (run, leg) -> requests that infer was sent, and rows, so far.
        problem: why the disk takes no rows now, "" where it does.

    Raises:
        EvidenceError: a file of the folder is no such log.
        MeasurementError: there can be no such folder, or nothing can be written there.
    """

    def __init__(self, folder: Path, waiting: int = WAITING) -> None:
        try:
            self._begin(folder)
        except OSError as error:
            raise MeasurementError(
                f"no log can be kept in {folder}: {error.strerror or error}",
                hint="--log names a folder that can be written",
            ) from None
        self.problem = ""
        self._most, self._size = waiting, 0
        self._short: list[bytes] = []  # rows that were given up, which come before the others
        self._rows: deque[bytes] = deque()
        self._whole = 0  # bytes of the file that are whole rows
        self._over = False  # whether rows were lost, so that it is no log any more

    def _begin(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.sent: dict[tuple[str, str], int] = {}
        self.logged: dict[tuple[str, str], int] = {}
        last = 0
        for file in sorted(folder.glob("*.jsonl")):
            match = _FILE.fullmatch(file.name)
            last = max(last, int(match[1]) if match else 0)
            for run, leg, index, served in _rows(file):
                self.logged[run, leg] = max(index + 1, self.logged.get((run, leg), 0))
                self.sent[run, leg] = max(served, self.sent.get((run, leg), 0))
        self.path = folder / f"served-{last + 1:04d}.jsonl"
        self._file = open(self.path, "ab", buffering=0, opener=_private)  # noqa: SIM115

    def write(self, row: bytes) -> bool:
        """Add a row; False where others were given up for it, or it finds no room."""
        if self._over:
            return False
        self._rows.append(row + b"\n")
        self._size += len(row) + 1
        if self._size >= _AT_ONCE and not self.problem:
            self.flush()
        return self._size <= self._most or self._shrink()

    def flush(self) -> None:
        """Write what waits, as far as the disk takes it."""
        data = memoryview(b"".join((*self._short, *self._rows)))
        size = len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if not self._over:
                self.problem = error.strerror or type(error).__name__
            with suppress(OSError):  # half a row would be one that nobody can read
                self._file.truncate(self._whole)
            return
        self._whole += size
        self._size = 0
        self._short.clear()
        self._rows.clear()
        if not self._over:
            self.problem = ""

    def _shrink(self) -> bool:
        """Give rows up, the oldest first and few at a time, so that what waits has room."""
        for _ in range(min(_FEW, len(self._rows))):
            row = self._rows.popleft()
            self._short.append(given_up(row, "no room in the log") + b"\n")
            self._size += len(self._short[-1]) - len(row)
            if self._size <= self._most:
                break
        if self._size > self._most and not self._rows:
            self._over, self.problem = True, "rows were lost: begin another log"
        return False

    def close(self) -> None:
        self.flush()
        self._file.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _rows(file: Path) -> Iterator[tuple[str, str, int, int]]:
    """Of each row what numbers go on from; half a line at the end is none."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield str(row["run"]), str(row["leg"]), int(row["index"]), int(row["served"])
            except (ValueError, KeyError, TypeError):
                if line.endswith(b"\n"):
                    raise EvidenceError(
                        f"{file}:{number} is no row of a log of requests",
                        hint="give the gateway a folder of its own for its log",
                    ) from None
