# Sockets: an address taken, and a server at it that ends on request.

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from servanda.errors import MeasurementError

BACKLOG = 2048
FREE = "--port 0 takes a free port"


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(host: str, port: int, hint: str = FREE) -> socket.socket:
    """A socket at the address, which no one can connect to yet; port 0 takes a free one.

    Args:
        hint: the next move where it cannot be had.

    Raises:
        MeasurementError: the address is taken, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named: asyncio sets TCP_NODELAY on no other, and every reply waits 40 ms
    server_socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind((host, port))
    except OSError as error:
        server_socket.close()
        raise _address_error(address(host, port), error, hint) from None
    return server_socket


def listen(server_socket: socket.socket, hint: str = FREE) -> None:
    """Let clients connect.

    Raises:
        MeasurementError: another server listens there: two that were bound while neither
            listened meet here.
    """
    try:
        server_socket.listen(BACKLOG)
    except OSError as error:
        raise _address_error(address(*server_socket.getsockname()[:2]), error, hint) from None


def _address_error(at: str, error: OSError, hint: str) -> MeasurementError:
    return MeasurementError(
        f"nothing can be served at {at}: {error.strerror or error}",
        hint=hint,
    )


def ends_quietly(app: ASGIApp) -> ASGIApp:
    """The application; a request that uvicorn cancels, at the end, is no error of its own."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return run


class AnnouncingServer(uvicorn.Server):
    """A server that says when it begins and when it ends, in its own loop.

    Args:
        ready: called once requests are taken; ending: once no more are.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._ready, self._ending = ready, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)


@contextlib.contextmanager
def stop_on_signals(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` at SIGTERM and Ctrl-C.

    uvicorn passes a signal on once it has ended: a requested end is no failure; and one that
    comes before uvicorn listens to signals is not lost.
    """

    before = {
        number: signal.signal(number, lambda *_: end())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
