# Socket, process and signals of a server.

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from servanda.engines.base import Engine
from servanda.engines.server.app import Faulty, Limits, Server
from servanda.errors import MeasurementError

_GRACE_S = 3  # what requests under way have left, once the server is told to end
_LAST_S = 1  # then what clients have to read that it ends


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address; port 0 takes a free one.

    Raises:
        MeasurementError: the address is taken, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named: asyncio sets TCP_NODELAY on no other, and every reply waits 40 ms
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise _taken_already(address(host, port), error) from None
    return taken


def _taken_already(at: str, error: OSError) -> MeasurementError:
    return MeasurementError(
        f"nothing can be served at {at}: {error.strerror or error}",
        hint="--port 0 takes a free port",
    )


class _Announcing(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], ending: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._ready, self._ending = ready, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_GRACE_S, self._ending)
        await super().shutdown(sockets)


def _ends_quietly(app: ASGIApp) -> ASGIApp:
    """The application; a request that uvicorn cancels, at the end, is no error of its own."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return run


def serve(
    engine: Engine,
    served: str,
    taken: socket.socket,
    limits: Limits,
    *,
    test_mode: bool,
    ready: Callable[[], None],
    faulty: Faulty | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; requests under way have a moment to end.

    Args:
        served: what clients call the model.
        ready: called once requests are taken.
        faulty: opens the same kernel with a fault, in test mode.

    Raises:
        MeasurementError: another server listens there by now.
    """
    try:
        taken.listen()  # two that were bound while neither listened meet here
    except OSError as error:
        raise _taken_already(address(*taken.getsockname()[:2]), error) from None
    server = Server(engine, served, limits, test_mode, faulty)
    config = uvicorn.Config(
        _ends_quietly(server.app()),
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S + _LAST_S,
    )
    running = _Announcing(config, ready, server.batcher.end)

    # uvicorn hands a signal on once it has ended: being told to end is no failure; and one that
    # comes before uvicorn listens to signals is not lost
    def end(*_: object) -> None:
        running.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        running.run(sockets=[taken])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
