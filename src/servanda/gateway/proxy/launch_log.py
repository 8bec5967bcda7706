# The dispatch log: requests to infer in dispatch order, and the rows of sampled ones.
#
# A row is opened when its request is dispatched, and released once it and all rows before it have a
# response or are lost.  So no response decides about a row (law 5).

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from servanda.gateway.proxy.config import Limits
from servanda.gateway.proxy.counters import Counts, InFlightMeans, add
from servanda.gateway.proxy.logprob_request import LogprobRequest
from servanda.gateway.proxy.request import RoutedRequest
from servanda.gateway.proxy.request_log import UNKNOWN_PROMPT, RequestLog, lost_row
from servanda.gateway.routing.model import Snapshot

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
