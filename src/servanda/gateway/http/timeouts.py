# Timeouts: every wait of a request has an end, and a client that hangs up ends all of them.
#
# One timer a request, which is moved only when it goes off too early or would too late; and,
# for a request that takes more than a moment, one task that listens to the client.  Either
# ends the request by cancelling its task, and `why` says which it was.

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from starlette.types import Receive

Wait = Literal["body", "reply", "part", "client"]
Why = Literal["", "body", "reply", "part", "client", "total", "gone"]
_MOMENT_S = 0.05  # a task that listens costs more than a short request does otherwise


class Timeouts:
    """Of the task that makes it.

    Args:
        total_s: after which the request ends, whatever it waits for.
        loop: that runs the task; before Python 3.12 finding it out is a system call.
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
        """What is waited for from now on, and how long at most.

        Raises:
            CancelledError: it has ended.  Before Python 3.12 a `wait_for` whose work is done in
                the same turn swallows that, and nothing would end the request any more.
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
        """End the request when its client hangs up; its body has been read.

        An earlier disconnect is noticed a moment later.
        """
        self._receive = receive
        if self._took_a_moment:
            self._listener = self._loop.create_task(self._listen(receive))

    def again(self) -> None:
        """A wait was ended, and the request goes on otherwise."""
        self.why = ""
        with contextlib.suppress(AttributeError):  # before Python 3.11 no one counts
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
