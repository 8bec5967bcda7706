# Socket, signals and limits of a public server: a gateway or its controller.

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from servanda.engines.server import sockets
from servanda.engines.tls import Certificate
from servanda.errors import MeasurementError
from servanda.gateway.http.error_replies import ErrorReply, Header, send_error

HEAD_BYTES = 64 << 10  # bytes of a request's line and headers
HEAD_S = 30.0  # time from the connection, or the head's first byte, to its last
KEEP_ALIVE_S = 75  # longer than the usual pause of a client's pool
_LEAVES_S = 0.5  # for the first request of a connection that was accepted last
_AHEAD = 8  # pipelined requests per connection
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"
_FIRST = 3  # the file descriptor of the first socket
# a Host: a name with underscores too, or [an IP literal], and a port, which may be empty (RFC 3986)
_HOST = re.compile(
    rb"(?:(?=[^:])[A-Za-z0-9._~!$&'()*+,;=\-]*(?:%[0-9A-Fa-f]{2}[A-Za-z0-9._~!$&'()*+,;=\-]*)*"
    rb"|\[(?:v[0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:\-]+|(?P<v6>[0-9A-Fa-f:.]+))\])"
    rb"(?::0*(?P<port>[0-9]{0,5}))?"
)
_HINT = "give the .socket unit one ListenStream= with a TCP port"


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket at the address; port 0 takes a free one.

    Args:
        option: command-line option of the port, for messages.

    Raises:
        MeasurementError: the address is in use, or not of this machine.
    """
    hint = f"{option} takes another address; port 0 is a free one"
    taken = sockets.bound(host, port, hint)
    try:
        sockets.listen(taken, hint)
    except MeasurementError:
        taken.close()
        raise
    return taken


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on the bytes and the time of a request's head.

    A head in one piece, the usual case, has no overhead.  Trailers after the last chunk of a body
    have the same limits.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._in_head, self._head = True, 0  # its bytes, if it came in pieces
        self._after = 0  # bytes since the end of the body
        self._late: asyncio.TimerHandle | None = None
        self._earlier: list[RequestResponseCycle] = []  # earlier requests without a response
        self.parser: Any = Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)
        for cycle in self._earlier:  # uvicorn reports only the last one
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        before = self._in_head
        self._after += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and before:  # otherwise it was the end of the last body
            self._head += len(data)
        if max(self._head, 0 if self._in_head else self._after) > HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._late is None and (self._in_head or self.cycle.response_complete):
            # the rest of a body after its response has the time limit of a head
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

    def on_message_complete(self) -> None:
        if not self.parser.declines:
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self.parser.declines:
            return  # its head is parsed again
        self._in_head, self._head, self._after = False, 0, 0
        self._in_time()
        before, app = self.cycle, self.app
        refused = head_error(self.parser.get_http_version(), self.headers)
        if refused is not None:  # in order: an earlier request may have no response yet
            self.app = _refusing(refused)
        super().on_headers_complete()
        self.app = app
        if before is not None and not before.response_complete:
            self._earlier = [c for c in self._earlier if not c.response_complete] + [before]
            if len(self._earlier) <= _AHEAD:  # or a disconnect would go unnoticed
                self.flow.resume_reading()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Parser:
    """The parser of httptools, which declines protocol upgrades.

    A server without the offered protocol (h2c, by Java's HttpClient) responds with HTTP/1.1 (RFC
    9110, 7.8).  httptools drops the body of such a request, so its head is parsed again without the
    offer.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol, self._parser = protocol, _parser(protocol)

    @property
    def declines(self) -> bool:
        """Whether the current head has an upgrade offer; CONNECT requests a tunnel instead."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self.declines:
                    raise
                rest = memoryview(rest)[offer.args[0] :]
            head, self._parser = self._head(), _parser(self._protocol)
            self._parser.feed_data(head)

    def _head(self) -> bytes:
        """The head without the upgrade offer."""
        version, protocol = self._parser.get_http_version().encode(), self._protocol
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), protocol.url, version)]
        lines += [b"%s: %s" % header for header in protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    with contextlib.suppress(AttributeError):  # httptools before 0.6.3
        # like uvicorn: a request is served although more data follows its `connection: close`
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def head_error(version: str, headers: Sequence[Header]) -> ErrorReply | None:
    """The refusal of a head that servers interpret differently; None if unambiguous.

    Args:
        version: HTTP version of the request line; headers: names in lower case.
    """
    if version not in ("1.0", "1.1"):
        message = f"HTTP/{version} is not spoken here: ask by HTTP/1.1"
        return ErrorReply(505, message, "http_version")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return ErrorReply(400, f"there are {len(hosts)} Host headers: send one", "hosts")
    if not hosts and version == "1.1":
        message = "there is no Host header, and HTTP/1.1 needs one: send it"
        return ErrorReply(400, message, "no_host")
    if hosts and not _is_host(hosts[0]):
        message = "the Host header is not a host: send NAME, NAME:PORT or [IPv6]:PORT"
        return ErrorReply(400, message, "bad_host")
    return None


def _is_host(value: bytes) -> bool:
    """Whether the value of a Host header is a host and, if any, a port (RFC 9112, 3.2)."""
    found = _HOST.fullmatch(value.strip(b" \t"))
    if found is None or int(found["port"] or 0) > 65535:
        return False
    try:
        return found["v6"] is None or bool(ipaddress.IPv6Address(found["v6"].decode()))
    except ValueError:
        return False


def _refusing(error: ErrorReply) -> ASGIApp:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send_error(send, error, ((b"connection", b"close"),))

    return app


class DrainingServer(sockets.AnnouncingServer):
    """A server that continues for a while after SIGTERM, for clients that do not know of it yet.

    Another signal or Ctrl-C ends it at once.  If its socket stays open for another process, it
    accepts no more connections first, and then waits a moment for the requests of those that it
    has.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        drain_s: float,
        draining: Callable[[], None],
        leaving: Callable[[], None] | None,
    ) -> None:
        super().__init__(config, ready)
        self._drain_s, self._draining, self._leaving = drain_s, draining, leaving
        self._end: float | None = None  # monotonic seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGTERM or not self._drain_s or self._end is not None:
            super().handle_exit(sig, frame)
            return
        self._end = time.monotonic() + self._drain_s
        self._draining()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._leaving is not None and not self.force_exit:
            self._leaving()
            for server in self.servers:
                server.close()
            await asyncio.sleep(_LEAVES_S)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._end is not None and time.monotonic() >= self._end:
            self.should_exit = True
        return await super().on_tick(counter)


class Listener:
    """An application at a socket, until its end is requested.

    Args:
        certificate: TLS certificate; None: plain HTTP.
        grace_s: grace period for requests in flight at the end.
        ready: called once requests are accepted.
        drain_s: how long it continues after SIGTERM; draining: called at SIGTERM, in the signal
            handler.
        leaving: called when it accepts no more connections, if its socket stays open for another
            process; None: it does not.
    """

    def __init__(
        self,
        app: ASGIApp,
        taken: socket.socket,
        *,
        certificate: Certificate | None = None,
        grace_s: int,
        ready: Callable[[], None] = lambda: None,
        drain_s: float = 0.0,
        draining: Callable[[], None] = lambda: None,
        leaving: Callable[[], None] | None = None,
    ) -> None:
        self._taken = taken
        config = uvicorn.Config(
            sockets.ends_quietly(app),
            http=BoundedProtocol,
            loop="auto",  # uvloop, if installed
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # no proxy headers from clients
            backlog=sockets.BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        if certificate is not None:
            config.load()
            config.ssl = certificate.context

        def begun() -> None:
            # modules live as long as the process: garbage collection over them takes tens of
            # milliseconds each time, during which all requests wait
            gc.collect()
            gc.freeze()
            ready()

        self._server = DrainingServer(config, begun, drain_s, draining, leaving)

    def end(self) -> None:
        """Accept no more requests, and end after those in flight; from any thread."""
        self._server.should_exit = True

    def run(self) -> None:
        """Serve until SIGTERM, Ctrl-C or `end`.

        Raises:
            MeasurementError: the application did not start; it printed the reason.
        """

        try:
            with sockets.stop_on_signals(self.end):
                self._server.run(sockets=[self._taken])
        except SystemExit:  # uvicorn's exit if its application does not start
            raise MeasurementError("the server did not start") from None


# A listening socket that a service manager keeps open, by the protocol of systemd's socket
# activation (sd_listen_fds): it outlives the gateway, so that connections wait during a restart.


def handed_socket() -> socket.socket | None:
    """The socket that was handed to this process; None if there is none.

    The environment variables about it are removed, so that child processes do not take it.

    Raises:
        MeasurementError: there are several, or it is not a listening TCP socket.
    """
    given = {name: os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID")}
    os.environ.pop("LISTEN_FDNAMES", None)
    if not given["LISTEN_FDS"] or given["LISTEN_PID"] != str(os.getpid()):
        return None
    if given["LISTEN_FDS"] != "1":
        raise MeasurementError(
            f"{given['LISTEN_FDS']} sockets were handed over (LISTEN_FDS), and a gateway has one",
            hint=_HINT,
        )
    try:
        handed = socket.socket(fileno=_FIRST)
    except OSError as error:
        raise MeasurementError(
            f"the socket that was handed over (LISTEN_FDS) cannot be used: {error.strerror}",
            hint=_HINT,
        ) from None
    is_tcp = handed.family in (socket.AF_INET, socket.AF_INET6)
    if not (is_tcp and handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        handed.close()
        raise MeasurementError(
            "the socket that was handed over (LISTEN_FDS) is no listening TCP socket", hint=_HINT
        )
    handed.set_inheritable(False)
    return handed
