# An exchange: one request of a client, and the forwarding of its reply.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from servanda.gateway.http.error_replies import ErrorReply, Header
from servanda.gateway.http.headers import Head, read_head
from servanda.gateway.proxy.config import Limits, Upstream
from servanda.gateway.proxy.pools.upstreams import ClientError, Response, UpstreamError

_EVENTS = "text/event-stream"
_WHOLE = 65_536  # bytes of a reply that are buffered before the first is sent
Wait = Literal["body", "reply", "part", "client"]
Why = Literal["", "body", "reply", "part", "client", "total", "gone"]
_MOMENT_S = 0.05  # a listening task costs more than the rest of a short request


class ClientGone(Exception):  # noqa: N818 - a client may leave
    """The client disconnected before its request was complete."""


@dataclass
class Exchange:
    """One request and the state of its reply.

    Args:
        holder: name of the holder of its key; "" if clients need no key.
        begun: whether any of the reply was sent; streams: whether it is an event stream, to which
            an event may be added; last: its last part.
        at_fault: why its body could not be read completely while it was forwarded.
        busy_s: seconds not spent waiting for others, so far; since: when the last wait ended.
        sent: last dispatch to an upstream; first_s: time from then to the first byte of the reply's
            body; None without one.
    """

    scope: Scope
    receive: Receive
    send: Send
    timeouts: Timeouts
    limits: Limits
    holder: str = ""
    begun: bool = False
    streams: bool = False
    last: bytes = b""
    at_fault: Exception | None = None
    more: list[Header] = field(default_factory=list)
    busy_s: float = 0.0
    since: float = field(default_factory=perf_counter)
    sent: float = 0.0
    first_s: float | None = None

    def __post_init__(self) -> None:
        self.headers: Sequence[Header] = self.scope["headers"]
        self.head: Head = read_head(self.headers)

    @property
    def address(self) -> str:
        client = self.scope.get("client")
        return str(client[0]) if client else ""

    @property
    def client(self) -> str:
        """The client's unforgeable identity: the name of its key, or its address."""
        return self.holder or self.address

    def with_query(self, path: str) -> str:
        query = self.scope["query_string"]
        return f"{path}?{query.decode('latin-1')}" if query else path

    def pause(self) -> None:
        """Mark the begin of a wait for another party."""
        self.busy_s += perf_counter() - self.since

    def resume(self) -> None:
        self.since = perf_counter()

    async def body(self) -> bytes:
        """The request's body.

        Raises:
            ErrorReply: it is too long.
            ClientGone: the client disconnected.
        """
        most = self.limits.body_bytes
        self.pause()
        self.timeouts.wait_for("body", self.limits.body_s)
        message = await self.receive()
        body = message.get("body", b"")
        if message.get("more_body") and len(body) <= most:
            parts, size = [body], len(body)
            while message.get("more_body") and size <= most:
                message = await self.receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
            body = b"".join(parts)
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.resume()
        if len(body) > most:
            raise ErrorReply(413, f"a body has {most:,} bytes at most: send less", "too_large")
        return body

    async def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        self.begun = True
        self._came()
        self.timeouts.wait_for("client", self.limits.stall_s)
        await self.send(_start(status, [*headers, *self.more]))
        if len(body) > _WHOLE:  # more than the connection's buffer: wait for it
            await self.parts(body)
            await self.end()
        else:
            await self.send({"type": "http.response.body", "body": body})

    async def start(self, response: Response, headers: list[Header]) -> None:
        """Send the head of a reply that is sent in parts."""
        self.begun = True
        whole = response.content_length is not None or is_packed(response)
        self.streams = is_stream(response) and not whole
        self.timeouts.wait_for("client", self.limits.stall_s)
        await self.send(_start(response.status, [*headers, *self.more]))

    async def part(self, data: bytes) -> None:
        """Send the next part of a reply; a client that stops reading is disconnected."""
        self._came()
        self.last = data
        self.timeouts.wait_for("client", self.limits.stall_s)
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def parts(self, data: bytes) -> None:
        """Send a long part; a slow client is not cut off while it reads."""
        for at in range(0, len(data), _WHOLE):
            await self.part(data[at : at + _WHOLE])

    def _came(self) -> None:
        if self.first_s is None and self.sent:
            self.first_s = perf_counter() - self.sent

    async def end(self) -> None:
        self.timeouts.wait_for("client", self.limits.stall_s)
        await self.send({"type": "http.response.body", "body": b""})

    async def give_up(self, error: ErrorReply) -> None:
        """End an incomplete reply: a stream by an error event, any other by a disconnect."""
        if not self.streams:
            self.cut()
            return
        ended = self.last.endswith((b"\n\n", b"\r\n\r\n")) or not self.last
        await self.part((b"" if ended else b"\n\n") + error.event)
        await self.end()

    def cut(self) -> None:
        """Close the connection in the middle of a reply: the client sees that it is incomplete."""
        holder: Any = getattr(self.send, "__self__", None)  # uvicorn's, of the connection
        with suppress(AttributeError):
            holder.disconnected = True  # otherwise it would log an incomplete reply
            holder.transport.abort()


def _start(status: int, headers: list[Header]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def is_stream(response: Response) -> bool:
    return response.headers.get("content-type", "").startswith(_EVENTS)


def is_packed(response: Response) -> bool:
    return response.headers.get("content-encoding", "identity").lower() != "identity"


async def forward(
    exchange: Exchange,
    response: Response,
    headers: list[Header],
    about: Upstream,
    begun: bytes = b"",
) -> None:
    """Forward a reply, byte for byte.

    Args:
        begun: bytes of it that were read already.

    Raises:
        UpstreamError: it broke off; if `begun` is false, before any of it was sent.
    """
    length = response.content_length
    content = response.content
    if response.status in (204, 304):  # a content-length is that of an absent body
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        length = 0
    try:
        if length is not None and length <= _WHOLE:
            body = await content.read()
            exchange.resume()
            await exchange.whole(response.status, headers, body)
            exchange.pause()
            return
        await exchange.start(response, headers)
        await exchange.parts(begun)
        exchange.pause()
        timeouts, idle_s = exchange.timeouts, about.idle_s
        timeouts.wait_for("part", about.first_byte_s)  # a head may be sent early
        async for data in content.iter_any():
            await exchange.part(data)
            timeouts.wait_for("part", idle_s)
    except (ClientError, OSError):
        raise UpstreamError("broken") from None
    await exchange.end()


# Timeouts: every wait of a request is limited, and a disconnect of the client ends it.
#
# One timer per request, which is moved only if it fires too early or would fire too late; and, for
# longer requests, one task that listens to the client.  Either ends the request by cancelling its
# task; `why` is the reason.


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
