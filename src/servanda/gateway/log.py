# The log of sampled requests, in the form of docs/how-to/traffic.md.
#
# Every start begins a new file, so that half a line which a crash left stays the last of its
# own; numbers go on from those of all files.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from servanda.errors import EvidenceError, MeasurementError

_FILE = re.compile(r"served-([0-9]{4,})\.jsonl")


class Log:
    """Rows to a file of a folder, as they come.

    Attributes:
        sent, logged: (run, leg) -> requests that infer was sent, and rows, so far.

    Raises:
        EvidenceError: a file of the folder is no such log.
        MeasurementError: there can be no such folder, or nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._begin(folder)
        except OSError as error:
            raise MeasurementError(
                f"no log can be kept in {folder}: {error.strerror or error}",
                hint="--log names a folder that can be written",
            ) from None
        self._broken = False

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
        self._file = self.path.open("ab")

    def write(self, row: bytes) -> bool:
        """Add a row; False where the disk takes none: a log with a gap would be worth nothing."""
        return self._try(lambda: self._file.write(row + b"\n"))

    def flush(self) -> bool:
        return self._try(self._file.flush)

    def close(self) -> None:
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> bool:
        if self._broken:
            return False
        try:
            act()
        except OSError:
            self._broken = True
        return not self._broken


def _rows(file: Path) -> Iterator[tuple[str, str, int, int]]:
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield str(row["run"]), str(row["leg"]), int(row["index"]), int(row["served"])
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise EvidenceError(
                    f"{file}:{number} is no row of a log of requests",
                    hint="give the gateway a folder of its own for its log",
                ) from None
