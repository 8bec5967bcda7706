# Socket, process and signals of a server.

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import uvicorn

from servanda.engines.base import Engine
from servanda.engines.server.app import Limits, Server
from servanda.errors import MeasurementError

_GRACE_S = 3  # what requests under way have left, once the server is told to end


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address; port 0 takes a free one.

    Raises:
        MeasurementError: the address is taken, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise MeasurementError(
            f"nothing can be served at {host}:{port}: {error.strerror or error}",
            hint="--port 0 takes a free port",
        ) from None
    return taken


class _Announcing(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def serve(
    engine: Engine,
    served: str,
    taken: socket.socket,
    limits: Limits,
    *,
    test_mode: bool,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C; requests under way have a moment to end.

    Args:
        served: what clients call the model.
        ready: called once requests are taken.
    """
    config = uvicorn.Config(
        Server(engine, served, limits, test_mode).app(),
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
    )
    # uvicorn hands a signal on once it has ended: being told to end is no failure
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _Announcing(config, ready).run(sockets=[taken])
