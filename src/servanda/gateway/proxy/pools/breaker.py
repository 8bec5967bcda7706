# Circuit breakers: a pool that fails repeatedly gets no requests for a while.
#
# A refused connection affects all clients.  Any other failure may be the fault of the request. Of
# those, each client has one vote, by the outcome of its latest request, so that no client can open
# the breaker for others by sending requests that fail.

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]
_LONGEST_S = 60.0
_CLIENTS = 1024  # clients kept


class Breaker:
    """Closed normally; open after failures; then half-open, for one trial at a time.

    It opens after `failures` failed connections in a row, or if requests of more than half of the
    recent clients failed, `failures` in a row in total.

    Args:
        clock: monotonic seconds.
        rest_s: time for which it stays open at first; doubled each time that its trials fail.
        trials: most concurrent trials while it is half-open; None: unlimited, for failures that
            only some requests can show.
        window_s: how long a client counts as recent.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        failures: int = 5,
        rest_s: float = 5.0,
        trials: int | None = 1,
        window_s: float = 30.0,
    ) -> None:
        self._clock, self._failures, self._rest_s, self._trials = clock, failures, rest_s, trials
        self._window_s = window_s
        # client -> (time of its last outcome, its failures in a row)
        self._votes: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._unreached = self._trying = 0
        self._next_s = rest_s
        self._until: float | None = None
        self._tried = 0.0
        # since the last opening: clients whose trial failed, and until when each of them waits
        self._resting: dict[str, float] = {}
        # the last two different clients and the times of their requests
        self._last = self._other = ("", -math.inf)

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    @property
    def wait_s(self) -> int:
        """Whole seconds until the next trial is allowed."""
        return 1 if self._until is None else max(1, round(self._until - self._clock()))

    def enter(self, client: str) -> bool:
        """Whether a request may pass; the caller later reports its outcome or its end."""
        now = self._clock()
        if client != self._last[0]:
            self._other = self._last
        self._last = (client, now)
        if self._until is None:
            return True
        if now < max(self._until, self._resting.get(client, self._until)):
            return False
        # a trial that takes longer than the open time does not block other trials
        busy = self._trials is not None and self._trying >= self._trials
        if busy and now < self._tried + self._next_s:
            return False
        self._tried = now
        self._trying += 1
        return True

    def succeeded(self, client: str) -> None:
        """Record the success of a request."""
        self._unreached = 0
        if self.state == "half-open":
            self._votes.clear()
            self._resting.clear()
            self._trying = 0
            self._until, self._next_s = None, self._rest_s
        self._vote(client, 0)

    def failed(self, client: str) -> None:
        """Record a failure that may be the fault of the request."""
        self._unreached = 0
        self._vote(client, self._votes.get(client, (0.0, 0))[1] + 1)
        state = self.state
        if state == "half-open":
            self._trying = max(0, self._trying - 1)
            others = [name for name in self._resting if name != client]
            if others or self._alone(client):
                self._open(2 * self._next_s)
            else:
                self._resting[client] = self._clock() + self._next_s
        elif state == "closed" and self._most_fail():
            self._open(self._next_s)

    def unreachable(self) -> None:
        """Record a refused connection."""
        self._unreached += 1
        state = self.state
        if state == "half-open":
            self._open(2 * self._next_s)
        elif state == "closed" and self._unreached >= self._failures:
            self._open(self._next_s)

    def abandoned(self) -> None:
        """Record a request that ended without information about the pool."""
        self._trying = max(0, self._trying - 1)

    def _vote(self, client: str, failures: int) -> None:
        self._votes[client] = (self._clock(), failures)
        self._votes.move_to_end(client)
        if len(self._votes) > _CLIENTS:
            self._votes.popitem(last=False)

    def _most_fail(self) -> bool:
        since = self._clock() - self._window_s
        lately = [failures for at, failures in self._votes.values() if at >= since]
        # one client's count is capped at the number that would suffice if it were the only one
        met = sum(min(failures, self._failures) for failures in lately)
        return met >= self._failures and 2 * sum(map(bool, lately)) > len(lately)

    def _alone(self, client: str) -> bool:
        """Whether there is no other recent client."""
        since = self._clock() - self._window_s - self._next_s
        return all(name == client or at < since for name, at in (self._last, self._other))

    def _open(self, rest_s: float) -> None:
        self._next_s = min(rest_s, _LONGEST_S)
        self._until, self._trying = self._clock() + self._next_s, 0
        self._resting.clear()
