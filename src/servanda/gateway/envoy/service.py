# The services that Envoy asks, in one process: gRPC at one address, HTTP at another.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from starlette.types import Receive, Scope, Send

from servanda.engines.server.sockets import address
from servanda.errors import MeasurementError
from servanda.gateway.envoy.ext_authz import AT, Authorization, check_http
from servanda.gateway.envoy.ext_proc import Processor
from servanda.gateway.envoy.leader_routes import LeaderRoutes
from servanda.gateway.envoy.request_route import RequestRoutes
from servanda.gateway.http.error_replies import ErrorReply, send_error, send_whole
from servanda.gateway.http.listener import Listener, bind

_GRACE_S = 5
_MOST = 4 << 20  # bytes of a gRPC message of a check: Envoy's max_request_bytes is below it


def serve(
    leader: LeaderRoutes,
    grpc_at: tuple[str, int],
    http_at: tuple[str, int],
    say: Callable[[str], None],
) -> None:
    """Answer Envoy until SIGTERM or Ctrl-C.

    Args:
        grpc_at, http_at: host and port; port 0 takes a free one.

    Raises:
        MeasurementError: an address is in use, or a package is not installed.
    """
    with bind(*http_at, "--http") as taken:
        app = Service(leader, grpc_at, say)
        where = address(http_at[0], taken.getsockname()[1])

        def ready() -> None:
            say(f"ext_proc and ext_authz by gRPC at {address(grpc_at[0], app.port)}")
            say(f"ext_authz by HTTP at http://{where}{AT}  (Ctrl-C stops it)")

        Listener(app, taken, grace_s=_GRACE_S, ready=ready).run()


class Service:
    """The ASGI application of the HTTP check, whose lifespan is that of the gRPC server."""

    def __init__(
        self, leader: LeaderRoutes, grpc_at: tuple[str, int], say: Callable[[str], None]
    ) -> None:
        self._leader, self._at, self._say = leader, grpc_at, say
        self._routes = RequestRoutes(leader)
        self._grpc: Any = import_module("grpc")
        self._services = (Authorization(self._routes), Processor(self._routes))
        self.port = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["path"].startswith(f"{AT}/"):
            await check_http(self._routes, scope, receive, send)
        elif scope["path"] == "/readyz":
            status, text = (200, b"ok\n") if self._leader.ready else (503, b"no routes yet\n")
            await send_whole(send, status, [], text)
        else:
            hint = f"checks are below {AT}: set it as path_prefix"
            await send_error(send, ErrorReply(404, f"no such path; {hint}", "not_found"))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # startup
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MOST)]
        server = self._grpc.aio.server(options=options)
        for service in self._services:
            service.join(server)
        try:
            self.port = server.add_insecure_port(address(*self._at))
        except RuntimeError:
            text = f"--grpc: {address(*self._at)} cannot be listened at; it may be in use"
            self._say(text)
            await send({"type": "lifespan.startup.failed", "message": text})
            return
        await server.start()
        following = asyncio.ensure_future(self._leader.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()  # shutdown
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await server.stop(_GRACE_S)
        await send({"type": "lifespan.shutdown.complete"})


def refuse_missing() -> None:
    """Say what is not installed, before all else.

    Raises:
        MeasurementError: grpcio or the protocols of Envoy are not installed.
    """
    for module in ("grpc", "envoy.service.ext_proc.v3", "envoy.service.auth.v3"):
        try:
            import_module(module)
        except ImportError:
            raise MeasurementError(
                f"the service for Envoy needs {module}, which is not installed",
                hint="pip install 'servanda[gateway,envoy]'",
            ) from None
