# Timeouts: every wait of a request is limited, and a disconnect of the client ends it.
#
# One timer per request, which is moved only if it fires too early or would fire too late; and, for
# longer requests, one task that listens to the client.  Either ends the request by cancelling its
# task; `why` is the reason.

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from starlette.types import Receive

Wait = Literal["body", "reply", "part", "client"]
Why = Literal["", "body", "reply", "part", "client", "total", "gone"]
_MOMENT_S = 0.05  # a listening task costs more than the rest of a short request


class Timeouts:
    """The timeouts of the task that creates it.

    Args:
        total_s: time limit of the request.
        loop: the loop of the task; before Python 3.12 its lookup is a system call.
    """

    def __init__(self, total_s: float, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self._loop, self._task = loop, task
        self._end = self._until = self._loop.time() + total_s
        self._wait: Wait = "body"
        self._timer: asyncio.TimerHandle | None = None
        self._rings = self._end
        self._listener: asyncio.Task[None] | None = None
        self._receive: Receive | None = None
        self._took_a_moment = self._gone = False
        self.why: Why = ""

    def wait_for(self, what: Wait, seconds: float) -> None:
        """Set the current wait and its time limit.

        Raises:
            CancelledError: the request has ended.  Before Python 3.12 a `wait_for` whose work
                completes in the same loop turn swallows a cancellation, so it is raised here again.
        """
        if self.why:
            raise asyncio.CancelledError
        self._wait, now = what, self._loop.time()
        self._until = until = min(now + seconds, self._end)
        if self._timer is None:
            soon = now + _MOMENT_S
            self._arm(until if self._took_a_moment else min(soon, until))
        elif self._rings > until:
            self._arm(until)

    def listen(self, receive: Receive) -> None:
        """End the request when its client disconnects; its body has been read.

        An earlier disconnect is noticed a moment later.
        """
        self._receive = receive
        if self._took_a_moment:
            self._listener = self._loop.create_task(self._listen(receive))

    def again(self) -> None:
        """Continue the request after a timeout."""
        self.why = ""
        with contextlib.suppress(AttributeError):  # before Python 3.11
            self._task.uncancel()  # type: ignore[attr-defined]

    @property
    def over(self) -> bool:
        """Whether there is no time for another attempt, or the client has disconnected."""
        return self._gone or self._loop.time() >= self._end

    def done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._stop("gone")

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings, self._timer = at, self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer, now = None, self._loop.time()
        self._took_a_moment = True
        if self._receive is not None and self._listener is None:
            self._listener = self._loop.create_task(self._listen(self._receive))
        if now < self._until:
            self._arm(self._until)
        else:
            self._stop("total" if now >= self._end else self._wait)

    def _stop(self, why: Why) -> None:
        if not self.why:
            self.why = why
            self._task.cancel()
