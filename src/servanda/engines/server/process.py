# Socket, process and signals of a server.

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from servanda.engines.base import Engine
from servanda.engines.server.app import Faulty, Limits, Server
from servanda.engines.server.sockets import AnnouncingServer, ends_quietly, listen, stop_on_signals

_GRACE_S = 3  # what requests under way have left, once the server is told to end
_LAST_S = 1  # then what clients have to read that it ends


def serve(
    engine: Engine,
    served: str,
    server_socket: socket.socket,
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
    listen(server_socket)
    server = Server(engine, served, limits, test_mode, faulty)
    config = uvicorn.Config(
        ends_quietly(server.app()),
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S + _LAST_S,
    )

    def ending() -> None:
        asyncio.get_running_loop().call_later(_GRACE_S, server.scheduler.end)

    running = AnnouncingServer(config, ready, ending)

    def end() -> None:
        running.should_exit = True

    with stop_on_signals(end):
        running.run(sockets=[server_socket])
