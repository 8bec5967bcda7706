# The listener of a leader that waits for the lead: it is alive, and refers to the one that leads.

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from servanda.errors import ServandaError
from servanda.gateway.controller.web.app import alive
from servanda.gateway.controller.web.auth import Guard, Limits, error_reply
from servanda.gateway.controller.web.metrics import leads
from servanda.gateway.http.api_keys import Keys

_METHODS = ["GET", "POST"]


def standby(
    name: str,
    keys: Keys,
    why: Callable[[], ServandaError],
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> ASGIApp:
    """The listener.

    Args:
        name: of the contract; why: who leads, or why it cannot.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Waiting(name))

    async def numbers(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    async def refused(_: Request) -> Response:
        return error_reply(503, why(), {"retry-after": "1"})

    routes = [
        Route("/healthz", alive),
        Route("/metrics", numbers),
        Route("/{path:path}", refused, methods=_METHODS),
    ]
    return Guard(Starlette(routes=routes), keys, limits)


class _Waiting(Collector):
    def __init__(self, name: str) -> None:
        self._name = name

    def collect(self) -> Iterator[Metric]:
        yield leads(self._name, False)
