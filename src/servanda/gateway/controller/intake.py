# Intake: merges the rows of all gateways into one order that does not depend on any response.
#
# Each gateway process numbers its rows in dispatch order and sends a closed prefix.  Rows are
# merged by (dispatch time, gateway, start, number).  If a gateway waits for a response, the merge
# waits too: otherwise slow responses would come later than fast ones.  Only a gateway that has
# stopped reporting is skipped.

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from servanda.gateway.controller.messages import Message
from servanda.traces.json_fields import LineError, json_text
from servanda.traces.request_log import Request, request_of, unanswered

NO_ROW = "a row that cannot be read"
UNREAD = "unreadable response"  # dispatched all the same: missing
APART = "rows sampled only for a promotion"
VANISHED = "rows that never arrived"
_SILENT_S = 5.0  # after which a silent gateway is skipped
_STREAMS = 256  # gateway processes kept
_SHOWN = 200  # characters of an error message
_RAREST = 1e-9  # inclusion probability: an estimate weights a row by its inverse
Start = tuple[str, float]  # (gateway, start of its process)


@dataclass(frozen=True)
class Row:
    """One sampled request.

    Args:
        at: dispatch time, unix seconds; non-decreasing within a stream.
        request: None if it could not be read.
        chance: inclusion probability at dispatch.
        version: version of the snapshot at dispatch; 0: unknown.
        drawn: slices whose sample contains it, each with its probability; None: unknown.
        slices: its slices at dispatch if its prompt is unknown; None: the prompt is known.
        best: number of top-k logprobs requested per token.
        outside: reason why it is no evidence; "" if it is, as far as checked.
        checked: whether it was validated.
        dropped: the queue was full, so that it is not scored.
    """

    start: Start
    number: int
    at: float
    request: Request | None
    chance: float = 1.0
    version: int = 0
    drawn: Mapping[str, float] | None = None
    slices: tuple[str, ...] | None = None
    best: int = 0
    outside: str = ""
    checked: bool = False
    dropped: bool = False

    @property
    def tokens(self) -> int:
        """Tokens to be scored."""
        if self.request is None or self.dropped or self.slices is not None:
            return 0
        return len(self.request.prompt) + len(self.request.tokens)

    @property
    def size(self) -> int:
        """How many numbers it holds in memory."""
        if self.request is None:
            return 0
        best = sum(map(len, self.request.best))
        return len(self.request.prompt) + 2 * (len(self.request.tokens) + best)

    @property
    def place(self) -> tuple[float, str, float, int]:
        return (self.at, *self.start, self.number)


@dataclass
class Stream:
    """The rows of one gateway process.

    Args:
        next: number of the next expected row; taken: number of the first row that is not durable.
        at: dispatch time of the last row; heard: time of the last message, by our clock.
        waits: whether dispatched rows wait there for a response, or for space here.
    """

    next: int
    taken: int
    at: float = -math.inf
    heard: float = -math.inf
    waits: bool = False
    rows: deque[Row] = field(default_factory=deque)


class Intake:
    """Rows queued for scoring, in their order; not thread-safe.

    Args:
        taken: per process, number of the first row that is not durable.
        rows, tokens: capacity of the queue for scoring; beyond it the oldest are dropped.
        held, size: most rows held at all, and numbers in them; beyond these a gateway keeps its own
            rows.
    """

    def __init__(
        self,
        taken: Mapping[Start, int],
        *,
        rows: int = 4096,
        tokens: int = 4_000_000,
        held: int = 16_384,
        size: int = 16_000_000,
    ) -> None:
        self.streams = {start: Stream(n, n) for start, n in taken.items()}
        self.room, self._tokens, self._held, self._most = rows, tokens, held, size
        self._size = 0  # numbers in the rows that are not durable
        self._queue: deque[Row] = deque()
        self.outside: Counter[str] = Counter()
        self.wrong = ""  # of the last unreadable row
        self.dropped = 0
        self.under_way = 0  # rows handed out and not durable yet

    def offer(self, message: Message, *, now: float) -> int:
        """Accept a message; returns the number of the first row that is not durable."""
        start, first = (message.gateway, message.start), message.first
        stream = self.streams.get(start)
        if stream is None:
            stream = self.streams[start] = Stream(first, first, heard=now)
            self._forget()
        if message.rows and first > stream.next:
            self.outside[VANISHED] += first - stream.next
            if not stream.rows and stream.taken == stream.next:
                stream.taken = first
            stream.next = first
        for number, data in enumerate(message.rows, start=first):
            if number < stream.next:
                continue  # a repeated row
            # one row per process is always accepted, or the merge would wait for it
            full = self.waiting >= self._held or self._size >= self._most
            if full and stream.rows:
                break
            row = self._row(start, number, data, stream.at, now)
            stream.rows.append(row)
            stream.next, stream.at = number + 1, row.at
            self._size += row.size
        stream.heard, stream.waits = now, message.launched > stream.next
        return stream.taken

    def take(self, rows: int, tokens: int, *, now: float, dropped: bool = False) -> list[Row]:
        """The next rows in order: a batch of limited size, with at least one row if any is queued.

        Args:
            dropped: only rows that need no scoring.
        """
        self._merge(now)
        self._drop()
        batch: list[Row] = []
        for row in itertools.islice(self._queue, rows):
            if dropped and not (row.dropped or row.outside):
                break
            tokens -= row.tokens
            if batch and tokens < 0:
                break
            batch.append(row)
        for _ in batch:
            self._queue.popleft()
        self.under_way += len(batch)
        return batch

    def put_back(self, rows: Sequence[Row]) -> None:
        """Return rows that could not be scored now to the queue."""
        self._queue.extendleft(reversed(rows))
        self.under_way -= len(rows)

    def durable(self, rows: Iterable[Row]) -> None:
        """Mark rows as stored, in order."""
        for row in rows:
            self.under_way -= 1
            self._size -= row.size
            stream = self.streams.get(row.start)
            if stream is not None:
                stream.taken = row.number + 1

    @property
    def waiting(self) -> int:
        """Rows that are not durable."""
        return self.queued + self.under_way

    @property
    def queued(self) -> int:
        return len(self._queue) + sum(len(stream.rows) for stream in self.streams.values())

    @property
    def queued_tokens(self) -> int:
        return sum(row.tokens for row in self._all())

    def starts(self) -> Iterator[Start]:
        """The gateway process of each queued row."""
        return (row.start for row in self._all())

    def _all(self) -> Iterator[Row]:
        yield from self._queue
        for stream in self.streams.values():
            yield from stream.rows

    def _merge(self, now: float) -> None:
        """Move the next rows in merge order from the streams to the queue."""
        # per gateway the process that reported last: its clock may have been set back
        newest: dict[str, tuple[float, float]] = {}
        for (name, began), stream in self.streams.items():
            stream.heard = min(stream.heard, now)  # the clock was set back
            latest = (stream.heard, began)
            newest[name] = max(latest, newest.get(name, latest))
        while True:
            heads = [s for s in self.streams.values() if s.rows]
            if not heads:
                return
            head = min(heads, key=lambda s: s.rows[0].place)
            place = head.rows[0].place[:3]
            for (name, began), other in self.streams.items():
                alive = began == newest[name][1] and now - other.heard <= _SILENT_S
                may = alive and (other.waits or other.heard < head.rows[0].at)
                if not other.rows and may and (other.at, name, began) < place:
                    return  # it may have an earlier row
            self._queue.append(head.rows.popleft())

    def _drop(self) -> None:
        """Drop the oldest rows beyond the capacity: recent ones are more informative."""
        live = [i for i, row in enumerate(self._queue) if not row.dropped]
        tokens = sum(row.tokens for row in self._queue)
        for n, i in enumerate(live):
            if len(live) - n <= self.room and tokens <= self._tokens:
                return
            row = self._queue[i]
            tokens -= row.tokens
            self._queue[i] = replace(row, dropped=True)
            self.dropped += 1

    def _row(self, start: Start, number: int, data: Any, after: float, now: float) -> Row:
        try:
            if not isinstance(data, dict):
                raise LineError("a row is a JSON object")
            request = self._request(data)
            chance, drawn, slices = inclusion_of(data)
        except LineError as wrong:
            self.wrong = str(wrong)[:_SHOWN]
            self.outside[NO_ROW] += 1
            return Row(start, number, max(after, 0.0), None, outside=NO_ROW, checked=True)
        version = data.get("x-version")
        # a clock that is ahead cannot date a row in the future
        at = max(after, min(request.at, now))
        known = version if isinstance(version, int) and not isinstance(version, bool) else 0
        apart = APART if drawn == {} else ""
        best = data.get("x-best")
        best = best if isinstance(best, int) else max(map(len, request.best), default=0)
        return Row(
            start, number, at, request, chance, known, drawn, slices, best, apart, bool(apart)
        )

    def _request(self, data: dict[str, Any]) -> Request:
        # an unreadable response counts as lost: the response must not decide whether it counts
        try:
            return request_of(data)
        except LineError as wrong:
            request = request_of(unanswered(data, UNREAD))
            self.wrong = str(wrong)[:_SHOWN]
            return request

    def _forget(self) -> None:
        """Forget processes that ended long ago."""
        while len(self.streams) > _STREAMS:
            done = [start for start, stream in self.streams.items() if not stream.rows]
            if not done:
                return
            del self.streams[min(done, key=lambda start: self.streams[start].heard)]


def inclusion_of(
    data: Mapping[str, Any],
) -> tuple[float, dict[str, float] | None, tuple[str, ...] | None]:
    """The inclusion of a row in the sample: its probability, the slices that sampled it with the
    probability of each, and its slices if its prompt is unknown.

    Raises:
        LineError: a field is invalid.
    """
    return _chance(data.get("x-chance")), _drawn(data.get("x-drawn")), _slices(data)


def _chance(value: Any) -> float:
    if value is None:
        return 1.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _RAREST <= value <= 1.0:
        raise LineError(f"'x-chance' is {json_text(value)}, not a probability of {_RAREST:g} to 1")
    return float(value)


def _drawn(value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise LineError("'x-drawn' is no object of slices and chances")
    return {name: _chance(chance) for name, chance in value.items()}


def _slices(data: Mapping[str, Any]) -> tuple[str, ...] | None:
    if data.get("x-prompt") != "unknown":
        return None
    names = data.get("x-slices")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LineError("'x-slices' is no list of slices, and the prompt is not known")
    return tuple(names)
