# The routes of a leader: every call of it runs in a thread, so that the loop stays live.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from servanda.errors import ContractError, EvidenceError, ServandaError
from servanda.gateway.controller.controller import Leader
from servanda.gateway.controller.web import page, requests
from servanda.gateway.controller.web.auth import (
    Guarded,
    Limits,
    allowed,
    busy,
    holder_of,
    json_reply,
    told,
    told_as,
)
from servanda.gateway.controller.web.metrics import Metrics
from servanda.gateway.controller.web.requests import Refused
from servanda.gateway.http.api_keys import Keys, Right
from servanda.gateway.routing.state import Transition
from servanda.registry import nearest, quoted
from servanda.traces.serialization import to_plain

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
_THREADS = 4  # for people; gateways have as many of their own
_LEFT = 499  # nobody reads it


def app(leader: Leader, keys: Keys, limits: Limits = Limits()) -> ASGIApp:  # noqa: B008 - frozen
    """The listener of a leader.

    Args:
        keys: without one of them nothing is told but that the process lives.
    """
    return Guarded(Web(leader, keys, limits).routes(), keys, limits)


class Web:
    """A leader behind its routes; who asks was found by the guard."""

    def __init__(self, leader: Leader, keys: Keys, limits: Limits) -> None:
        self._leader, self._keys, self._limits = leader, keys, limits
        self._metrics = Metrics(leader.standing)
        self._people = CapacityLimiter(_THREADS)
        self._gateways = CapacityLimiter(_THREADS)
        self._follows = 0

    def routes(self) -> Starlette:
        reads: tuple[tuple[str, Right, Handler], ...] = (
            ("/", "read", self._page),
            ("/page", "read", self._fragment),
            ("/metrics", "read", self._numbers),
            ("/v1/status", "read", self._status),
            ("/v1/route/snapshot", "route", self._snapshot),
            ("/assets/{name}", "read", self._asset),
        )
        acts: tuple[tuple[str, Right, Handler], ...] = (
            ("/v1/follow", "follow", self._follow),
            ("/v1/route/decide", "route", self._decide),
            ("/v1/admin/pin", "pin", self._pin),
            ("/v1/admin/unpin", "pin", self._unpin),
            ("/v1/admin/route", "pin", self._route),
            ("/v1/admin/reload", "reload", self._reload),
        )
        routes = [Route("/healthz", _alive)]
        routes += [Route(at, _guarded(right, handler)) for at, right, handler in reads]
        routes += [Route(a, _guarded(r, handler), methods=["POST"]) for a, r, handler in acts]
        found = Starlette(
            routes=routes,
            exception_handlers={HTTPException: _not_found},  # type: ignore[dict-item]
        )
        found.router.redirect_slashes = False  # it would send whoever asks to any Host they name
        return found

    async def _page(self, request: Request) -> Response:
        return await self._shown(request, page.page)

    async def _fragment(self, request: Request) -> Response:
        return await self._shown(request, page.fragment)

    async def _shown(self, request: Request, show: Callable[..., str]) -> Response:
        holder = holder_of(request)
        html = await self._thread(lambda: show(self._leader.standing(), holder))
        return Response(html, media_type="text/html")

    async def _asset(self, request: Request) -> Response:
        found = page.ASSETS.get(request.path_params["name"])
        if found is None:
            raise Refused(404, "there is no such file")
        kept = {"cache-control": "private, max-age=86400"}
        return Response(found.data, headers=kept, media_type=found.media_type)

    async def _numbers(self, request: Request) -> Response:
        text, media_type = await self._thread(
            partial(self._metrics.told, request.headers.get("accept", ""))
        )
        return Response(text, headers={"content-type": media_type})

    async def _status(self, _: Request) -> Response:
        return await self._json(lambda: to_plain(self._leader.standing()))

    async def _snapshot(self, request: Request) -> Response:
        snapshot = await self._thread(lambda: self._leader.snapshot)
        tag = f'"{snapshot.version}"'
        known = request.headers.get("if-none-match", "")
        if any(one.strip().removeprefix("W/") in (tag, "*") for one in known.split(",")):
            return Response(status_code=304, headers={"etag": tag})
        return json_reply(to_plain(snapshot), headers={"etag": tag})

    async def _decide(self, request: Request) -> Response:
        known = requests.known_of(await self._body(request))
        return await self._json(lambda: to_plain(self._leader.decide(known)))

    async def _follow(self, request: Request) -> Response:
        if self._follows >= self._limits.follows:
            return busy()
        self._follows += 1
        try:
            data = await self._body(request, self._limits.follow_bytes)
            follow = self._leader.follow
            reply = await to_thread.run_sync(
                lambda: json_reply(follow(requests.message_of(data))), limiter=self._gateways
            )
        finally:
            self._follows -= 1
        return reply

    async def _pin(self, request: Request) -> Response:
        pin = requests.pin_of(await self._body(request))
        who = holder_of(request).name

        def done() -> tuple[Transition, ...]:
            self._known(pin.slice)
            return self._leader.pin(pin.slice, pin.to, pin.ttl_s, actor=who, reason=pin.reason)

        return await self._moved(done)

    async def _unpin(self, request: Request) -> Response:
        slice_, reason = requests.unpin_of(await self._body(request))
        who = holder_of(request).name

        def done() -> tuple[Transition, ...]:
            self._known(slice_)
            return self._leader.unpin(slice_, actor=who, reason=reason)

        return await self._moved(done)

    async def _route(self, request: Request) -> Response:
        body = requests.route_of(await self._body(request))
        who = holder_of(request).name

        def done() -> dict[str, Any]:
            if body is not None:
                self._leader.route(body, actor=who)
            return {"version": self._leader.snapshot.version}

        return await self._json(done)

    async def _reload(self, request: Request) -> Response:
        requests.body_of(await self._body(request))
        who = holder_of(request).name
        refused = await self._thread(lambda: self._leader.reload(actor=who))
        if refused:
            raise Refused(409, refused, "the contract that was followed before still is")
        return await self._json(lambda: {"version": self._leader.snapshot.version})

    def _known(self, slice_: str) -> None:
        """Refuse a slice that the contract does not watch, before anything is decided."""
        names = [one.name for one in self._leader.snapshot.slices]
        if slice_ not in names:
            raise Refused(404, f"no slice is named {quoted(slice_)}", nearest(slice_, names))

    async def _moved(self, act: Callable[[], tuple[Transition, ...]]) -> Response:
        return await self._json(lambda: {"transitions": [*map(to_plain, act())]})

    async def _json(self, make: Callable[[], Any]) -> Response:
        return await self._thread(lambda: json_reply(make()))

    async def _thread(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._people)

    async def _body(self, request: Request, most: int | None = None) -> bytes:
        """The JSON text of a request.

        Raises:
            Refused: it is no JSON, by its own word; it is too large, or comes too slowly.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "an act is JSON", "send content-type: application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refused(415, "a body is not compressed here", "send no content-encoding")
        most, idle_s = most or self._limits.act_bytes, self._limits.idle_s

        async def collected() -> bytes:
            data = bytearray()
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise Refused(413, f"a body has {most:,} bytes at most here")
            return bytes(data)

        try:
            return await asyncio.wait_for(collected(), idle_s)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not come within {idle_s:g} s") from None


def _guarded(right: Right, handler: Handler) -> Handler:
    """The handler for whoever has the right; what it raises is told as JSON."""

    async def guarded(request: Request) -> Response:
        try:
            allowed(request, right)
            return await handler(request)
        except Refused as error:
            return told(error)
        except ClientDisconnect:
            return Response(status_code=_LEFT)
        except (ContractError, EvidenceError) as error:
            return told_as(409 if request.url.path.startswith("/v1/admin") else 400, error)
        except ServandaError as error:  # it cannot be kept, and the same again may be
            return told_as(503, error, {"retry-after": "1"})

    return guarded


async def _alive(_: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _not_found(_: Request, error: HTTPException) -> Response:
    hint = "" if error.status_code != 404 else "/ is the page; the others are in the reference"
    headers = dict(error.headers) if error.headers else None
    return told(Refused(error.status_code, str(error.detail).lower(), hint), headers)
