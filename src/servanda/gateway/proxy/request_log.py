# The log of sampled requests, in the format of docs/how-to/traffic.md.
#
# Each start begins a new file, so that a partial line after a crash is the last of its file; a full
# or old file is also closed.  Numbering continues over all files: counts.json has the numbers
# before the newest file, so that only that one is read at a start.  Rows are written about once per
# second.  While the disk accepts none they are queued, and the file ends at a complete row; beyond
# the capacity rows are replaced by lost rows one by one, because a log with a gap would be
# unusable.
#
# The dispatch log has the requests to infer in dispatch order, and the rows of sampled ones.  A row
# is opened when its request is dispatched, and released once it and all rows before it have a
# response or are lost.  So no response decides about a row (law 5).

from __future__ import annotations

import fcntl
import io
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from servanda.errors import EvidenceError, MeasurementError
from servanda.gateway.proxy.config import Limits, LogFiles
from servanda.gateway.proxy.counters import Counts, InFlightMeans, add
from servanda.gateway.proxy.logprob_request import LogprobRequest
from servanda.gateway.proxy.request import RoutedRequest
from servanda.gateway.routing.model import Snapshot
from servanda.traces.request_log import MARK

# placeholder for unknown prompt ids: every row has the field
UNKNOWN_PROMPT: Mapping[str, Any] = {"prompt_token_ids": [0], "x-prompt": "unknown"}
_OURS = (
    *("index", "run", "leg", "at", "served", "key"),
    *("x-best", "x-chance", "x-drawn", "x-slices", "x-mirrored", "x-version", "x-replica"),
)
_FILE = re.compile(r"served-([0-9]{4,})\.jsonl")
_COUNTS = "counts.json"
_AT_ONCE = 1 << 20
_ASSIGNMENT = f'"{MARK}":'.encode()
_LINES = 100_000  # assignments that wait to be written
_OF_REQUESTS = ("labels", "prompt_tokens")  # outside data of an assignment
_FEW = 16  # rows dropped to make room for one
_SWEEP_S = 60.0  # between two searches for old files
NOT_KEPT = "not kept"  # reason of a row without a response if no token ids are stored
WAITING = 64 << 20  # bytes of queued rows


def lost_row(row: bytes, why: str) -> bytes:
    """A row marked as lost, without outside data."""
    known = {name: value for name, value in msgspec.json.decode(row).items() if name in _OURS}
    lost = {**known, "sampling": {"max_new_tokens": 1}, **UNKNOWN_PROMPT, "lost": why}
    return msgspec.json.encode(lost)


class _Numbers(msgspec.Struct):
    """The numbers of the last row of a step."""

    run: str
    leg: str
    index: int
    served: int


class _Counts(msgspec.Struct):
    """The numbers before a file: of each step its last row."""

    file: int
    legs: list[_Numbers]


_numbers = msgspec.json.Decoder(_Numbers).decode
_counts = msgspec.json.Decoder(_Counts).decode


class RequestLog:
    """Writes rows to files of a folder that only its owner can read.

    Args:
        waiting: capacity of the queue, in bytes.
        clock: monotonic seconds; now: unix seconds.

    Attributes:
        sent, logged: (run, leg) -> requests sent to infer, and rows, so far.
        problem: why rows cannot be written now, "" if they can.

    Raises:
        EvidenceError: a file of the folder is not such a log.
        MeasurementError: the folder cannot be created or written, or another gateway uses it.
    """

    def __init__(
        self,
        files: LogFiles,
        waiting: int = WAITING,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files, self._clock, self._now = files, clock, now
        self.problem = ""
        self._most, self._size = waiting, 0
        self._short: list[bytes] = []  # dropped rows, which precede the others
        self._rows: deque[bytes] = deque()
        self._lines: list[bytes] = []  # assignments
        self._over = False  # whether rows are missing, so that the log is unusable
        self._counted, self._swept = False, -math.inf
        with MeasurementError.of_system(
            f"no log can be kept in {files.folder}", hint="--log names a folder that can be written"
        ):
            self._begin(files.folder)

    def _begin(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        try:
            self.sent: dict[tuple[str, str], int] = {}
            self.logged: dict[tuple[str, str], int] = {}
            first = self._known(folder / _COUNTS)
            last = first - 1
            for file in folder.glob("*.jsonl"):
                match = _FILE.fullmatch(file.name)
                last = max(last, int(match[1]) if match else 0)
                if match is None or int(match[1]) >= first:
                    for row in _rows(file):
                        self._note(row.run, row.leg, row.index, row.served)
            self._number, self._before = last + 1, self._legs()
            self._open()
            self._count()
        except BaseException:
            os.close(self._lock)
            raise

    def _known(self, path: Path) -> int:
        """Restore the counts of an earlier start; returns the first file that they do not cover."""
        try:
            counts = _counts(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return 1  # read all files
        for leg in counts.legs:
            self._note(leg.run, leg.leg, leg.index, leg.served)
        return counts.file

    def _note(self, run: str, leg: str, index: int, served: int) -> None:
        self.logged[run, leg] = max(index + 1, self.logged.get((run, leg), 0))
        self.sent[run, leg] = max(served, self.sent.get((run, leg), 0))

    def _legs(self) -> list[_Numbers]:
        return [_Numbers(*key, n - 1, self.sent[key]) for key, n in self.logged.items()]

    def _open(self) -> io.FileIO:
        self.path = self._files.folder / f"served-{self._number:04d}.jsonl"
        self._file: io.FileIO | None = io.FileIO(self.path, "ab", opener=_new)
        self._whole, self._since = 0, self._clock()
        return self._file

    def _count(self) -> None:
        """Store the numbers before the newest file."""
        new = self._files.folder / f"{_COUNTS}.new"
        new.unlink(missing_ok=True)
        with open(new, "wb", opener=_new) as file:
            file.write(msgspec.json.encode(_Counts(self._number, self._before)))
        new.replace(self._files.folder / _COUNTS)
        self._counted = True

    def write(self, row: bytes, fields: Mapping[str, Any]) -> bool:
        """Add a row; False if rows were dropped.

        Args:
            fields: facts known at dispatch.
        """
        if self._over:
            return False
        if not self._files.tokens:
            row = lost_row(row, NOT_KEPT)
        self._rows.append(row + b"\n")
        self._size += len(row) + 1
        self._note(fields["run"], fields["leg"], fields["index"], fields["served"])
        if self._size >= _AT_ONCE and not self.problem:
            self.flush()
        return self._size <= self._most or self._shrink()

    def assign(self, line: Mapping[str, Any]) -> None:
        """Add the line of an assignment; it is dropped while too many of them are queued."""
        if self._over or len(self._lines) >= _LINES:
            return
        if not self._files.tokens:
            line = {name: value for name, value in line.items() if name not in _OF_REQUESTS}
        self._lines.append(msgspec.json.encode(line) + b"\n")

    def flush(self) -> None:
        """Write queued rows as far as possible, and close a file that is full or old."""
        try:
            due = self._clock() - self._since >= self._files.file_s
            due |= self._whole >= self._files.file_bytes
            if self._file is not None and self._whole and due:
                self._file.close()
                self._file, self._number, self._counted = None, self._number + 1, False
            self._append()
            if not self._counted:
                self._count()
            self._sweep()
            problem = ""
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if not self._over:
            self.problem = problem

    def _append(self) -> None:
        data = memoryview(b"".join((*self._short, *self._rows, *self._lines)))
        size = len(data)
        if not data:
            return
        file = self._file or self._open()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):  # a partial row would be unreadable
                file.truncate(self._whole)
            raise
        self._since = self._since if self._whole else self._clock()
        self._whole += size
        self._before = self._legs()
        self._size = 0
        self._short.clear()
        self._rows.clear()
        self._lines.clear()

    def _sweep(self) -> None:
        """Delete files older than their retention time."""
        keep, now = self._files.keep_s, self._clock()
        if keep is None or now < self._swept + _SWEEP_S:
            return
        self._swept = now
        for file in self._files.folder.iterdir():
            match = _FILE.fullmatch(file.name)
            ended = match is not None and int(match[1]) < self._number
            if ended and self._now() - file.stat().st_mtime >= keep:
                file.unlink()

    def _shrink(self) -> bool:
        """Drop rows, the oldest first and few at a time, to keep the queue within its capacity."""
        for _ in range(min(_FEW, len(self._rows))):
            row = self._rows.popleft()
            self._short.append(lost_row(row, "no room in the log") + b"\n")
            self._size += len(self._short[-1]) - len(row)
            if self._size <= self._most:
                break
        if self._size > self._most and not self._rows:
            self._over, self.problem = True, "rows were lost: start a new log"
        return False

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            if not self._whole:
                self.path.unlink(missing_ok=True)
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """A descriptor with an exclusive lock on the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise MeasurementError(
            f"another gateway writes its log to {folder}",
            hint="give each gateway a folder of its own, or wait until that one has ended",
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


def _rows(file: Path) -> Iterator[_Numbers]:
    """The numbers of each row; a partial line at the end is ignored."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            # the line of an assignment has no number
            if not line.strip() or (b'"index":' not in line and _ASSIGNMENT in line):
                continue
            try:
                yield _numbers(line)
            except msgspec.DecodeError:
                if line.endswith(b"\n"):
                    raise EvidenceError(
                        f"{file}:{number} is not a row of a request log",
                        hint="give the gateway a folder of its own for its log",
                    ) from None


Leg = tuple[str, str]  # run and leg
_KEPT = 256  # prompt ids kept in a dropped row
MESSAGE_ROWS, _MESSAGE_BYTES = 512, 8 << 20
_DROPPED: Mapping[str, Any] = {"lost": "dropped"}


@dataclass(eq=False, slots=True)
class OpenRow:
    """A sampled request, open until its response.

    Args:
        fields: facts known at dispatch; at: time of dispatch, monotonic seconds.
    """

    fields: dict[str, Any]
    at: float
    done: bytes | None = None


class LaunchLog:
    """Counts every request to infer, and keeps the rows of sampled ones until they are stored.

    Args:
        clock: monotonic seconds; now: unix seconds.
    """

    def __init__(
        self,
        limits: Limits,
        counts: Counts,
        log: RequestLog | None,
        *,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._limits, self._counts, self._log = limits, counts, log
        self._clock, self._now = clock, now
        self.in_flight = InFlightMeans(clock)
        self._sent: dict[Leg, int] = dict(log.sent) if log else {}
        self._logged: dict[Leg, int] = dict(log.logged) if log else {}
        self._open: deque[OpenRow] = deque()
        self._ready: deque[bytes] = deque()
        self._rows = self._bytes = 0  # rows with a response, of both
        self.first = 0  # number of the first queued row
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def room(self) -> bool:
        """Whether one more request may be sampled."""
        return len(self._open) + len(self._ready) < 4 * self._limits.rows

    def launch(
        self,
        routed: RoutedRequest,
        snapshot: Snapshot | None,
        logprob_request: LogprobRequest | None,
    ) -> OpenRow | None:
        """Count a request, and open its row if it is sampled.

        Args:
            logprob_request: the request for infer; None: not sampled.
        """
        decision = routed.decision
        for name in decision.slices:
            add(self._counts.launched, name)
        if snapshot is None:
            return None
        leg = (snapshot.run or snapshot.name, snapshot.leg or "gateway")
        served = self._sent[leg] = self._sent.get(leg, 0) + 1
        if logprob_request is None:
            return None
        index = self._logged.get(leg, 0)
        fields = {
            "index": index,
            "run": leg[0],
            "leg": leg[1],
            "at": self._now(),
            "served": served,
            "sampling": logprob_request.sampling,
            "labels": routed.facts.labels,
            "key": routed.user_hash,
            "x-best": logprob_request.best,
            "x-chance": decision.chance,
            "x-drawn": decision.drawn,
            "x-slices": decision.slices,
            "x-mirrored": decision.mirrored,
            "x-version": decision.version,
        }
        row = OpenRow(fields, self._clock())
        self._logged[leg] = index + 1  # last, so that a failure leaves no gap
        self._counts.sampled += 1
        self._open.append(row)
        return row

    def resolve(self, row: OpenRow, answer: Mapping[str, Any], prompt: list[int] | None) -> None:
        """Complete a row, and release rows that no earlier one blocks.

        Args:
            prompt: ids of the prompt that infer ran; None: unknown.
        """
        if row.done is not None:
            return  # it had timed out
        full = self._rows >= self._limits.rows or self._bytes >= self._limits.row_bytes
        done = b"" if full else _written(row, answer, prompt)
        if not done or len(done) > _MESSAGE_BYTES:
            answer = answer if "lost" in answer else _DROPPED
            short = prompt if prompt is not None and len(prompt) <= _KEPT else None
            done = _written(row, answer, short)
        if answer == _DROPPED:
            self._counts.dropped += 1
        row.done = done
        self._rows += 1
        self._bytes += len(done)
        self._release()

    def sweep(self) -> None:
        """Mark rows without a response as lost after a timeout."""
        before = self._clock() - self._limits.row_s
        for row in [row for row in self._open if row.done is None and row.at < before]:
            self.resolve(row, {"lost": "timeout"}, None)

    def end(self) -> None:
        """Mark all open rows as lost: a dispatched request may not vanish."""
        for row in [row for row in self._open if row.done is None]:
            self.resolve(row, {"lost": "the gateway ended"}, None)

    def waiting(self, most: int = MESSAGE_ROWS) -> list[bytes]:
        """The released rows; the first has the number `first`."""
        rows: list[bytes] = []
        size = 0
        for row in islice(self._ready, most):
            size += len(row)
            if rows and size > _MESSAGE_BYTES:
                break
            rows.append(row)
        return rows

    def refused(self) -> None:
        """Mark the first queued row as lost: the controller cannot read it.

        No outside data of it is kept.
        """
        self._bytes -= len(self._ready[0])
        self._ready[0] = lost_row(self._ready[0], "refused row")
        self._bytes += len(self._ready[0])

    def taken(self, number: int) -> None:
        """Drop rows before this number: they are stored by the controller."""
        while self._ready and self.first < number:
            self._rows -= 1
            self._bytes -= len(self._ready.popleft())
            self.first += 1

    @property
    def last(self) -> int:
        """The number after the last queued row."""
        return self.first + len(self._ready)

    def _release(self) -> None:
        went = False
        while self._open and self._open[0].done is not None:
            row = self._open.popleft()
            assert row.done is not None
            self._ready.append(row.done)
            if self._log is not None and not self._log.write(row.done, row.fields):
                add(self._counts.reflexes, "no log")
            went = True
        if went:
            self.on_ready()


def _written(row: OpenRow, answer: Mapping[str, Any], prompt: list[int] | None) -> bytes:
    known = {"prompt_token_ids": prompt} if prompt else UNKNOWN_PROMPT
    return msgspec.json.encode({**row.fields, **known, **answer})
