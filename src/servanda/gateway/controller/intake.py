# Intake: rows from gateways, put into one order that no answer has a say in.
#
# Each start of a gateway numbers its rows in launch order and sends a closed prefix.  Rows of
# several are merged by (time of launch, gateway, start, number).  A gateway that waits for an
# answer is waited for, however long that takes: if the rows of others went before, slow answers
# would come later than fast ones.  Only one that is not heard any more holds nobody up.

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from servanda.gateway.controller.messages import Message
from servanda.traces.json_fields import LineError
from servanda.traces.request_log import Request, request_of, unanswered

NO_ROW = "a row that cannot be read"
UNREAD = "an answer that cannot be read"  # it was launched all the same: it is missing
APART = "rows that only a promotion asked for"
VANISHED = "rows that never came: their numbers were passed over"
_SILENT_S = 5.0  # after which a gateway that says nothing is not waited for
_STREAMS = 256  # starts of gateways that are remembered
_SHOWN = 200  # characters of what is wrong with a row
_RAREST = 1e-9  # chance of being sampled: an estimate weighs a row by its inverse
Start = tuple[str, float]  # a gateway, and when its process began


@dataclass(frozen=True)
class Row:
    """One sampled request as it came.

    Args:
        at: when it was launched, unix seconds; never before the row before it.
        request: None where it could not be read.
        chance: of being sampled, as it was at launch.
        version: of the snapshot that it was launched under; 0: not known.
        drawn: slices whose sample it is part of, with the chance of each; None: no one said.
        slices: that it lay in at launch, where no one knows its prompt; None: the prompt is known.
        best: likeliest tokens of each step that infer was asked for.
        outside: why it is no evidence; "" where it is, as far as it was looked at.
        checked: whether it was looked at.
        dropped: it found no room, and train does not score it.
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
        """That wait for train."""
        if self.request is None or self.dropped or self.slices is not None:
            return 0
        return len(self.request.prompt) + len(self.request.tokens)

    @property
    def size(self) -> int:
        """Numbers that it holds in memory."""
        if self.request is None:
            return 0
        best = sum(map(len, self.request.best))
        return len(self.request.prompt) + 2 * (len(self.request.tokens) + best)

    @property
    def place(self) -> tuple[float, str, float, int]:
        return (self.at, *self.start, self.number)


@dataclass
class Stream:
    """What came from one start of a gateway.

    Args:
        next: number of the row that is expected; taken: of the first that is not durable.
        at: launch of the last row; heard: when it was heard last, by our clock.
        waits: whether rows that were launched wait there for an answer, or for room here.
    """

    next: int
    taken: int
    at: float = -math.inf
    heard: float = -math.inf
    waits: bool = False
    rows: deque[Row] = field(default_factory=deque)


class Intake:
    """Rows that wait to be scored, in their order; not for several threads at once.

    Args:
        taken: of each start, the first row that is not durable.
        rows, tokens: that wait for train at most; beyond, the oldest are dropped.
        held, size: rows that are kept at all, and numbers in them; beyond, a gateway keeps
            its own.
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
        self.wrong = ""  # with the last row that could not be read
        self.dropped = 0
        self.under_way = 0  # rows that were handed out, and are not durable

    def offer(self, message: Message, *, now: float) -> int:
        """Take a message; the number of the first row that is not durable."""
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
                continue  # it came before
            # one of each start is taken always, or the others would wait for it
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
        """The next rows in order: a batch of at most so many, and one at least where there is.

        Args:
            dropped: only such as train is not needed for.
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
        """Rows that were taken and could not be scored now."""
        self._queue.extendleft(reversed(rows))
        self.under_way -= len(rows)

    def durable(self, rows: Iterable[Row]) -> None:
        """Rows that are kept now, in order."""
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
        """Of each row that waits to be scored."""
        return (row.start for row in self._all())

    def _all(self) -> Iterator[Row]:
        yield from self._queue
        for stream in self.streams.values():
            yield from stream.rows

    def _merge(self, now: float) -> None:
        """Move what is next in the one order from the streams to the queue."""
        # of each gateway the start that was heard last: its clock may have gone back in between
        newest: dict[str, tuple[float, float]] = {}
        for (name, began), stream in self.streams.items():
            stream.heard = min(stream.heard, now)  # a clock that went back
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
                    return  # it may have one that was launched before
            self._queue.append(head.rows.popleft())

    def _drop(self) -> None:
        """Give up the oldest rows beyond the bounds: what was launched last says most."""
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
        # a clock that is ahead says nothing of the future
        at = max(after, min(request.at, now))
        known = version if isinstance(version, int) and not isinstance(version, bool) else 0
        apart = APART if drawn == {} else ""
        best = data.get("x-best")
        best = best if isinstance(best, int) else max(map(len, request.best), default=0)
        return Row(
            start, number, at, request, chance, known, drawn, slices, best, apart, bool(apart)
        )

    def _request(self, data: dict[str, Any]) -> Request:
        # an answer that cannot be read is lost: what it is like may not decide whether it counts
        try:
            return request_of(data)
        except LineError as wrong:
            request = request_of(unanswered(data, UNREAD))
            self.wrong = str(wrong)[:_SHOWN]
            return request

    def _forget(self) -> None:
        """Starts that ended long ago."""
        while len(self.streams) > _STREAMS:
            done = [start for start, stream in self.streams.items() if not stream.rows]
            if not done:
                return
            del self.streams[min(done, key=lambda start: self.streams[start].heard)]


def inclusion_of(
    data: Mapping[str, Any],
) -> tuple[float, dict[str, float] | None, tuple[str, ...] | None]:
    """How a row came into the sample: its chance, the slices that drew it with the chance of
    each, and its slices where its prompt is not known.

    Raises:
        LineError: a row says what cannot be.
    """
    return _chance(data.get("x-chance")), _drawn(data.get("x-drawn")), _slices(data)


def _chance(value: Any) -> float:
    if value is None:
        return 1.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _RAREST <= value <= 1.0:
        raise LineError(f"'x-chance' is {value!r}, not a probability of {_RAREST:g} to 1")
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
