# The guard before every route: authentication, limits, and security headers.

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servanda.errors import ServandaError
from servanda.gateway.controller.web.requests import RequestError
from servanda.gateway.http.api_keys import RIGHTS, Holder, Keys, Right

OPEN = "/healthz"  # the one path that needs no key
ASSETS = "/assets/"
HOLDER = "servanda.holder"  # of the scope
_KEY_NEEDED = "a key is needed: Authorization: Bearer KEY"
_SAFE = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)


@dataclass(frozen=True)
class Limits:
    """The limits of the listener.

    Args:
        in_flight: most concurrent requests; in_flight_per_key: most of one key.
        follows: most of them from gateways; follows_per_key: most of one key.
        follow_bytes, act_bytes: most bytes of a body, of a gateway and of others.
        idle_s: time for a client to read a response, and for a gateway to send a body.
        act_s: time for others to send a body.
    """

    in_flight: int = 64
    in_flight_per_key: int = 24
    follows: int = 12
    follows_per_key: int = 8
    follow_bytes: int = 16 << 20
    act_bytes: int = 64 << 10
    idle_s: float = 30.0
    act_s: float = 5.0


class Flights:
    """Requests in flight, of which a key has a share, so that others are answered.

    The last third is for keys that have none in flight: a few keys together cannot take all.
    """

    def __init__(self, most: int, per_key: int) -> None:
        self._most, self._per_key = most, per_key
        self._of: Counter[str] = Counter()

    def refusal(self, key: str) -> Response | None:
        """The refusal of one more request of a key; None if there is room for it."""
        own, free = self._of[key], self._most - self._of.total()
        if free <= 0:
            error = ServandaError("too many requests at a time", hint="ask again")
            return error_reply(503, error, {"retry-after": "1"})
        if own >= self._per_key or (own and free <= self._most // 3):
            message, hint = "too many requests of this key at a time", "wait for one of them"
            return error_reply(429, ServandaError(message, hint=hint), {"retry-after": "1"})
        return None

    @contextmanager
    def entered(self, key: str) -> Iterator[None]:
        self._of[key] += 1
        try:
            yield
        finally:
            self._of[key] -= 1


class Guard:
    """Wraps an app with keys, limits and headers."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits
        self._flights = Flights(limits.in_flight, limits.in_flight_per_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # the lifespan; there are no web sockets
            return

        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SAFE:
                    headers[name] = value
                if message["status"] in (408, 413):
                    headers["connection"] = "close"  # the rest of the body is not read
                if not scope["path"].startswith(ASSETS) or message["status"] != 200:
                    headers["cache-control"] = "no-store"
            # a slow reader occupies a slot
            await asyncio.wait_for(send(message), self._limits.idle_s)

        try:
            if scope["path"] == OPEN:
                await self._app(scope, receive, safely)
            elif (refusal := self._refusal(scope)) is not None:
                await refusal(scope, receive, safely)
            else:
                with self._flights.entered(scope[HOLDER].name):
                    await self._app(scope, receive, safely)
        except asyncio.TimeoutError:
            return  # the client has stopped reading; the server closes the connection

    def _refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request; None if it may pass."""
        headers = Headers(scope=scope)
        given = headers.getlist("authorization")
        holder = self._keys.who(given[0] if len(given) == 1 else "" if given else None)
        if holder is None:
            message = "unknown key" if given else _KEY_NEEDED
            hint = "in a browser: any user name, and the key as the password"
            challenge = {"www-authenticate": 'Basic realm="servanda", charset="UTF-8"'}
            return error_reply(401, ServandaError(message, hint=hint), challenge)
        # a browser names the origin of a request; the page's own are accepted
        site = headers.get("sec-fetch-site", "same-origin")
        if scope["method"] not in ("GET", "HEAD") and site not in ("same-origin", "none"):
            return error_reply(403, ServandaError("the request comes from another site"))
        scope[HOLDER] = holder
        return self._flights.refusal(holder.name)


def holder_of(request: Request) -> Holder:
    return request.scope[HOLDER]


def require_right(request: Request, right: Right) -> None:
    """Check that a holder has a right.

    Raises:
        RequestError: the holder lacks it.
    """
    holder = holder_of(request)
    if holder.may(right):
        return
    article = "an" if holder.role[0] in "aeiou" else "a"
    raise RequestError(
        403,
        f"{holder.name} is {article} {holder.role}, and this needs the role {RIGHTS[right][0]}",
        "use a key with this role, or give the role to this one in the file of keys",
    )


def error_reply(
    status: int, error: ServandaError, headers: dict[str, str] | None = None
) -> Response:
    """An error as JSON."""
    lines = (f"{p.where}: {p.message}" if p.where else p.message for p in error.problems)
    body = {
        "message": "; ".join(lines),
        "hint": next((p.hint for p in error.problems if p.hint), ""),
        "code": status,
    }
    return json_reply({"error": body}, status, headers)


def json_reply(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(body, status, headers, media_type="application/json")
