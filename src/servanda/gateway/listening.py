# Socket, signals and limits of a server that strangers reach: of the gateway, and of its leader.

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from servanda import sockets
from servanda.errors import MeasurementError

HEAD_BYTES = 64 << 10  # of a request's line and headers
HEAD_S = 30.0  # from a connection, or the head's first byte, to its last
KEEP_ALIVE_S = 75  # longer than the usual pause of a client's pool
_AHEAD = 8  # requests that a connection sends before the first of them is answered
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"


def bound(host: str, port: int, option: str) -> socket.socket:
    """A socket at the address, with clients that wait in it; port 0 takes a free one.

    Args:
        option: of the command line, which named the port.

    Raises:
        MeasurementError: the address is taken, or none of this machine's.
    """
    hint = f"{option} takes another address; port 0 is a free one"
    taken = sockets.bound(host, port, hint)
    try:
        sockets.listen(taken, hint)
    except MeasurementError:
        taken.close()
        raise
    return taken


class Bounded(HttpToolsProtocol):
    """uvicorn's protocol, with a bound on the bytes and on the time of a request's head.

    A head that comes in one piece, as nearly all do, costs nothing more.  What follows the last
    chunk of a body is no header, and has the same bound.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._in_head, self._head = True, 0  # bytes of it, where it came in pieces
        self._after = 0  # bytes since the body's last
        self._late: asyncio.TimerHandle | None = None
        self._earlier: list[RequestResponseCycle] = []  # requests before the last, unanswered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)
        for cycle in self._earlier:  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        before = self._in_head
        self._after += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and before:  # else it was the end of the last body
            self._head += len(data)
        if max(self._head, 0 if self._in_head else self._after) > HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._late is None and (self._in_head or self.cycle.response_complete):
            # what is left of a body that was answered already has no more time than a head
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._after = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head, self._after = False, 0, 0
        self._in_time()
        before = self.cycle
        super().on_headers_complete()
        if before is not None and not before.response_complete:
            self._earlier = [c for c in self._earlier if not c.response_complete] + [before]
            if len(self._earlier) <= _AHEAD:  # else nobody would hear that the client hangs up
                self.flow.resume_reading()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Listening:
    """An application at a socket, until it is told to end.

    Args:
        grace_s: what requests under way have left then.
        ready: called once requests are taken.
    """

    def __init__(
        self,
        app: ASGIApp,
        taken: socket.socket,
        *,
        grace_s: int,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._taken = taken
        config = uvicorn.Config(
            sockets.ends_quietly(app),
            http=Bounded,
            loop="auto",  # uvloop, where there is one
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # whoever connects says nothing of whence
            backlog=sockets.BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )

        def begun() -> None:
            # modules live as long as the process: to look at all of them for garbage takes tens
            # of milliseconds each time, in which everybody waits
            gc.collect()
            gc.freeze()
            ready()

        self._server = sockets.Announcing(config, begun)

    def end(self) -> None:
        """Take no more requests, and end once those under way have; from any thread."""
        self._server.should_exit = True

    def run(self) -> None:
        """Serve until SIGTERM, Ctrl-C or `end`.

        Raises:
            MeasurementError: the application did not start; it said why.
        """

        try:
            with sockets.told_to_end(self.end):
                self._server.run(sockets=[self._taken])
        except SystemExit:  # of uvicorn, where its application does not start
            raise MeasurementError("the server did not start") from None
