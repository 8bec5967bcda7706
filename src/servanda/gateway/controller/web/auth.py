# The guard before every route: authentication, limits, and security headers.

from __future__ import annotations

import asyncio
import json
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
        in_flight: most concurrent requests; follows: most of them from gateways.
        follow_bytes, act_bytes: most bytes of a body.
        idle_s: time for a client to send a body or to read a response.
    """

    in_flight: int = 64
    follows: int = 8
    follow_bytes: int = 16 << 20
    act_bytes: int = 64 << 10
    idle_s: float = 30.0


class Guard:
    """Wraps an app with keys, limits and headers."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits
        self._in_flight = 0

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

        if self._in_flight >= self._limits.in_flight:
            await busy()(scope, receive, safely)
            return
        self._in_flight += 1
        try:
            answer = None if scope["path"] == OPEN else self._refusal(scope)
            await (answer or self._app)(scope, receive, safely)
        except asyncio.TimeoutError:
            return  # the client has stopped reading; the server closes the connection
        finally:
            self._in_flight -= 1

    def _refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request; None if it may pass."""
        headers = Headers(scope=scope)
        given = headers.getlist("authorization")
        holder = self._keys.who(given[0] if len(given) == 1 else None)
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
        return None


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


def busy() -> Response:
    error = ServandaError("too many requests at a time", hint="ask again")
    return error_reply(503, error, {"retry-after": "1"})


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
