# The routes of a controller: every call of it runs in a thread, so that the loop stays live;
# and the guard before every route: authentication, limits, and security headers.

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args

import msgspec
from anyio import CapacityLimiter, to_thread
from msgspec import Meta
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servanda.errors import ContractError, EvidenceError, ServandaError
from servanda.gateway.controller import messages
from servanda.gateway.controller.controller import Controller
from servanda.gateway.controller.messages import PromotionRoute
from servanda.gateway.controller.status import CellStatus, ControllerStatus, SliceStatus
from servanda.gateway.controller.store import StandbyError
from servanda.gateway.controller.web import format, summary
from servanda.gateway.controller.web.metrics import Metrics, leads, refused_keys
from servanda.gateway.http.api_keys import RIGHTS, Holder, Keys, Right
from servanda.gateway.routing.model import PinTo, Pool, RequestFacts
from servanda.gateway.routing.state import Transition
from servanda.registry import did_you_mean, quoted
from servanda.report.format import count, duration, line, percent, place
from servanda.report.html import environment
from servanda.traces import json_fields
from servanda.traces.json_fields import json_text
from servanda.traces.serialization import to_plain

# Requests are JSON bodies, validated strictly.  None can name a file or a URL.

LONGEST_PIN_S = 30 * 86_400.0
_PINS = get_args(PinTo)
_FACTS = 'session is infer, stable or null, and labels are texts, such as {"tenant": "acme"}'
T = TypeVar("T")
_LONGEST = 500  # characters of a reason
_NAME = 1024  # of any other text
# further fields of a promotion's route: its webhook may point here
_EFFECT = ("kind", "key", "stage", "status", "from", "why", "decided", "at", "to", "for")


class RequestError(ServandaError):
    """A refused request, with its HTTP status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class _Facts(msgspec.Struct):
    request: Annotated[str, Meta(min_length=1, max_length=_NAME)]
    sticky: Annotated[str, Meta(min_length=1, max_length=_NAME)] | None = None
    labels: dict[str, Annotated[str, Meta(max_length=_NAME)]] | None = None
    prompt_tokens: messages.Count | None = None
    session: Pool | None = None


@dataclass(frozen=True)
class PinRequest:
    """A request for a pin.

    Args:
        to: None: the pin is released; ttl_s: its lifetime.
    """

    slice: str
    reason: str
    to: PinTo | None = None
    ttl_s: float = 0.0


def message_of(data: bytes) -> dict[str, Any]:
    """A gateway's message.

    Raises:
        RequestError: not a JSON object.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}") from None


def body_of(data: bytes, *keys: str) -> dict[str, Any]:
    """The JSON object of a request, which may have only these keys.

    Raises:
        RequestError: not a JSON object, or an unknown or repeated key.
    """
    try:
        body = json_fields.parse_line(data.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    except json_fields.LineError as wrong:
        raise RequestError(400, f"the body: {wrong}") from None
    for key in body:
        if key not in keys:
            known = f"keys: {', '.join(keys)}" if keys else "send {}"
            hint = did_you_mean(key, keys) if keys else ""
            hint = hint if hint.startswith("did you") else known
            raise RequestError(400, f"the body has no key {json_text(key)}", hint)
    return body


def pin_of(data: bytes) -> PinRequest:
    """A pin.

    Raises:
        RequestError: the body is invalid, or the pin would last longer than 30 days.
    """
    body = body_of(data, "slice", "to", "ttl_s", "reason")
    to, ttl_s = body.get("to"), body.get("ttl_s")
    if to not in _PINS:
        raise RequestError(400, f"to is {json_text(to)}", f"known: {', '.join(_PINS)}")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0:
        message = f"ttl_s is {json_text(ttl_s)}, not a number of seconds"
        raise RequestError(400, message, "such as 86400")
    if ttl_s > LONGEST_PIN_S:
        hint = "pin again when it ends, or change the contract"
        raise RequestError(400, "a pin holds for 30 days at most", hint)
    return PinRequest(_text(body, "slice"), _reason(body), cast(PinTo, to), float(ttl_s))


def unpin_of(data: bytes) -> PinRequest:
    """A request to release a pin.  Raises: see `pin_of`."""
    body = body_of(data, "slice", "reason")
    return PinRequest(_text(body, "slice"), _reason(body))


def route_of(data: bytes) -> PromotionRoute | None:
    """A promotion's route; None: another notification of it, such as a page.

    Raises:
        RequestError: the body is invalid.
    """
    body = body_of(data, *PromotionRoute.__struct_fields__, *_EFFECT)
    if body.get("kind", "route") != "route":
        return None
    hint = "send the body of a promotion's route effect as it is"
    return _converted(PromotionRoute, body, "a route", hint)


def request_facts_of(data: bytes) -> RequestFacts:
    """The facts of a request that another gateway asks to route.

    Raises:
        RequestError: the body is invalid.
    """
    body = body_of(data, *_Facts.__struct_fields__)
    facts = _converted(_Facts, body, "a request", _FACTS)
    sticky = facts.request if facts.sticky is None else facts.sticky
    labels, tokens = facts.labels or {}, facts.prompt_tokens
    return RequestFacts(facts.request, sticky, labels, tokens, facts.session)


def _converted(kind: type[T], body: dict[str, Any], noun: str, hint: str) -> T:
    try:
        return messages.converted(kind, body, noun, hint)
    except EvidenceError as error:
        raise RequestError(400, error.problems[0].message, error.problems[0].hint) from None


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value or len(value) > _NAME:
        message = f"{key} is {json_text(value)}, not a text"
        raise RequestError(400, message, f"1 to {_NAME} characters")
    return value


def _reason(body: Mapping[str, Any]) -> str:
    value = body.get("reason")
    # on one line: it is printed where control characters would take effect
    if not isinstance(value, str) or not line(value):
        raise RequestError(400, "an act needs a reason", "the ledger keeps it")
    if len(value) > _LONGEST:
        raise RequestError(400, f"a reason has {_LONGEST} characters at most", "shorten it")
    return line(value)


OPEN = "/healthz"  # the one path that needs no key
_ASSETS = "/assets/"
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
                if not scope["path"].startswith(_ASSETS) or message["status"] != 200:
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


Handler = Callable[[Request], Awaitable[Response]]
_THREADS = 4  # for people; gateways have as many in addition
_LEFT = 499  # its body is not read
TERM = "x-servanda-term"  # header: number of the lead
_METHODS = ["GET", "POST"]
_MOVES = 12  # latest decisions that are shown
_PACKAGE = "servanda.gateway.controller.web"


def app(controller: Controller, keys: Keys, limits: Limits = Limits()) -> ASGIApp:
    """The listener of a controller.

    Args:
        keys: API keys; without one of them only the liveness check is answered.
    """
    return Guard(ControllerRoutes(controller, limits, keys).routes(), keys, limits)


class ControllerRoutes:
    """The HTTP routes of a controller; the guard has identified the holder of the key."""

    def __init__(self, controller: Controller, limits: Limits, keys: Keys) -> None:
        self._controller, self._limits = controller, limits
        self._metrics = Metrics(controller.status, lambda: keys.refused)
        self._people = CapacityLimiter(_THREADS)
        self._gateways = CapacityLimiter(_THREADS)
        self._follows = Flights(limits.follows, limits.follows_per_key)

    def routes(self) -> Starlette:
        reads: tuple[tuple[str, Right, Handler], ...] = (
            ("/", "read", self._html(whole_page)),
            ("/page", "read", self._html(fragment)),
            ("/metrics", "read", self._numbers),
            ("/v1/status", "read", self._status),
            ("/v1/route/snapshot", "route", self._snapshot),
            ("/assets/{name}", "read", self._asset),
        )
        acts: tuple[tuple[str, Right, Handler], ...] = (
            ("/v1/follow", "follow", self._follow),
            ("/v1/route/decide", "route", self._decide),
            ("/v1/admin/pin", "pin", self._set_pin(pin_of)),
            ("/v1/admin/unpin", "pin", self._set_pin(unpin_of)),
            ("/v1/admin/route", "pin", self._route),
            ("/v1/admin/reload", "reload", self._reload),
        )
        routes = [Route("/healthz", alive)]
        routes += [Route(at, self._guarded(right, handler)) for at, right, handler in reads]
        routes += [Route(a, self._guarded(r, handler), methods=["POST"]) for a, r, handler in acts]
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: _not_found},  # type: ignore[dict-item]
        )
        app.router.redirect_slashes = False  # a redirect would go to any Host that the client names
        return app

    def _html(self, render: Callable[..., str]) -> Handler:
        async def handler(request: Request) -> Response:
            holder = holder_of(request)
            html = await self._thread(lambda: render(self._controller.status(), holder))
            return Response(html, media_type="text/html")

        return handler

    async def _asset(self, request: Request) -> Response:
        asset = ASSETS.get(request.path_params["name"])
        if asset is None:
            raise RequestError(404, "there is no such file")
        caching = {"cache-control": "private, max-age=86400"}
        return Response(asset.data, headers=caching, media_type=asset.media_type)

    async def _numbers(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        text, media_type = await self._thread(lambda: self._metrics.exposition(accept))
        return Response(text, headers={"content-type": media_type})

    async def _status(self, _: Request) -> Response:
        return await self._json(lambda: to_plain(self._controller.status()))

    async def _snapshot(self, request: Request) -> Response:
        snapshot = await self._thread(lambda: self._controller.snapshot)
        tag = f'"{snapshot.version}"'
        known = request.headers.get("if-none-match", "")
        if any(etag.strip().removeprefix("W/") in (tag, "*") for etag in known.split(",")):
            return Response(status_code=304, headers={"etag": tag})
        return json_reply(to_plain(snapshot), headers={"etag": tag})

    async def _decide(self, request: Request) -> Response:
        facts = request_facts_of(await self._body(request))
        return await self._json(lambda: to_plain(self._controller.decide(facts)))

    async def _follow(self, request: Request) -> Response:
        key = holder_of(request).name
        if (refusal := self._follows.refusal(key)) is not None:
            return refusal
        with self._follows.entered(key):
            data = await self._body(request, self._limits.follow_bytes, self._limits.idle_s)
            follow = self._controller.follow
            return await to_thread.run_sync(
                lambda: json_reply(follow(message_of(data))), limiter=self._gateways
            )

    def _set_pin(self, parse: Callable[[bytes], PinRequest]) -> Handler:
        async def handler(request: Request) -> Response:
            pin_request = parse(await self._body(request))
            who = holder_of(request).name

            def transitions() -> tuple[Transition, ...]:
                names = [route.name for route in self._controller.snapshot.slices]
                if (name := pin_request.slice) not in names:  # the contract does not watch it
                    message = f"no slice is named {quoted(name)}"
                    raise RequestError(404, message, did_you_mean(name, names))
                pin = self._controller.pin
                return pin(
                    pin_request.slice,
                    pin_request.to,
                    pin_request.ttl_s,
                    actor=who,
                    reason=pin_request.reason,
                )

            return await self._json(lambda: {"transitions": [*map(to_plain, transitions())]})

        return handler

    async def _route(self, request: Request) -> Response:
        route = route_of(await self._body(request))
        if route is not None:
            await self._thread(lambda: self._controller.route(route))
        return await self._version()

    async def _reload(self, request: Request) -> Response:
        body_of(await self._body(request))
        problem = await self._thread(self._controller.reload)
        if problem:
            raise RequestError(409, problem, "the previous contract stays in effect")
        return await self._version()

    async def _version(self) -> Response:
        return await self._json(lambda: {"version": self._controller.snapshot.version})

    def _guarded(self, right: Right, handler: Handler) -> Handler:
        """The handler for a holder of the right; its errors become JSON."""

        async def guarded(request: Request) -> Response:
            try:
                require_right(request, right)
                self._refuse_replaced()
                reply = await handler(request)
                # it may have been replaced meanwhile, and what it says is out of date then
                self._refuse_replaced()
            except RequestError as error:
                return error_reply(error.status, error)
            except ClientDisconnect:
                return Response(status_code=_LEFT)
            except (ContractError, EvidenceError) as error:
                return error_reply(409 if request.url.path.startswith("/v1/admin") else 400, error)
            except ServandaError as error:  # it cannot be stored now; a retry may succeed
                return error_reply(503, error, {"retry-after": "1"})
            reply.headers[TERM] = str(self._controller.term)
            return reply

        return guarded

    def _refuse_replaced(self) -> None:
        """Refuse to answer where another leader may lead.

        Raises:
            StandbyError: it may.
        """
        if not self._controller.leads:
            raise StandbyError("this leader lost the lead", hint="ask the other leader")

    async def _json(self, make: Callable[[], Any]) -> Response:
        return await self._thread(lambda: json_reply(make()))

    async def _thread(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._people)

    async def _body(self, request: Request, most: int = 0, within_s: float = 0.0) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                415, "the request must be JSON", "send content-type: application/json"
            )
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError(415, "a compressed body is not accepted", "send no content-encoding")
        most, within_s = most or self._limits.act_bytes, within_s or self._limits.act_s

        async def collected() -> bytes:
            data = bytearray()
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise RequestError(413, f"a body has {most:,} bytes at most here")
            return bytes(data)

        try:
            return await asyncio.wait_for(collected(), within_s)
        except asyncio.TimeoutError:
            raise RequestError(408, f"the body did not come within {within_s:g} s") from None


async def alive(_: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _not_found(_: Request, error: HTTPException) -> Response:
    hint = "" if error.status_code != 404 else "/ is the page; the others are in the reference"
    headers = dict(error.headers) if error.headers else None
    problem = ServandaError(str(error.detail).lower(), hint=hint)
    return error_reply(error.status_code, problem, headers)


# The listener of a leader that waits for the lead: it is alive, and refers to the one that leads.


def standby(name: str, keys: Keys, why: Callable[[], ServandaError]) -> ASGIApp:
    """The listener.

    Args:
        name: of the contract; why: who leads, or why it cannot.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Waiting(name, keys))

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
    return Guard(Starlette(routes=routes), keys, Limits())


class _Waiting(Collector):
    def __init__(self, name: str, keys: Keys) -> None:
        self._name, self._keys = name, keys

    def collect(self) -> Iterator[Metric]:
        yield leads(self._name, False)
        yield refused_keys(self._name, self._keys.refused)


# The page of a controller: its status as tables.  It is served whole, and as a fragment for the
# script that updates it; without the script the browser reloads the page.


@dataclass(frozen=True)
class Asset:
    """A file that the page loads; its address changes with its content."""

    data: bytes
    media_type: str

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:12]


ASSETS: Mapping[str, Asset] = {
    name: Asset((resources.files(_PACKAGE) / "assets" / name).read_bytes(), media_type)
    for name, media_type in (("page.css", "text/css"), ("page.js", "text/javascript"))
}


class Table(NamedTuple):
    """A table of texts; the first column names the row, and "" is printed as a dash.

    Args:
        numbers: the columns that are aligned to the right.
    """

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: range = range(0)


def whole_page(status: ControllerStatus, holder: Holder) -> str:
    """The whole page.

    Args:
        holder: the reader: pins are offered to those who may pin.
    """
    return _template("page.html").render(**view(status, holder))


def fragment(status: ControllerStatus, holder: Holder) -> str:
    """The part of the page that changes."""
    return _template("fragment.html").render(**view(status, holder))


@lru_cache(maxsize=2)
def _template(name: str) -> Any:
    return environment(_PACKAGE).get_template(name)


def view(status: ControllerStatus, holder: Holder) -> dict[str, Any]:
    """Everything that the page shows, by the names that its templates use."""
    digest = status.contract.removeprefix("sha256:")[:8]
    return {
        "s": status,
        "head": summary.headline(status),
        "basis": f"{summary.who_serves(status)} · {summary.basis(status)}",
        "rows": [_row(slice_, status) for slice_ in summary.ordered(status.slices)],
        "tables": [_evidence(status), _decisions(status), _traffic(status)],
        "problems": [summary.problem(text, 400) for text in status.problems],
        "name": line(status.name, 80),
        "contract": " · ".join(filter(None, (digest, line(status.run, 40), line(status.leg, 40)))),
        "holder": holder,
        "may_pin": holder.may("pin"),
        "now": format.stamp(status.now),
        "ledger": line(status.ledger_where, 120),
        "assets": ASSETS,
    }


def _row(slice_: SliceStatus, status: ControllerStatus) -> dict[str, Any]:
    cell = summary.worst(slice_)
    return {
        "slice": slice_,
        "name": place(slice_.name, 400),
        "share": percent(slice_.share),
        "state": summary.state(slice_),
        "since": duration(status.now - slice_.since) if slice_.since else "",
        "notes": summary.notes(slice_, status.now),
        "served_by": summary.served_by(slice_, status),
        "would_be": summary.would_be(slice_, status),
        "replies": ", ".join(
            f"{line(pool, 20)} {n:,}" for pool, n in sorted(slice_.served.items()) if n > 0
        ),
        "cell": cell,
        "value": format.measured(cell.value) if cell is not None else "",
        "limit": summary.limit(cell) if cell is not None else "",
        "clause": line(cell.clause, 60) if cell is not None else "",
        "alarm": summary.of_threshold(cell.nearness, "threshold")
        if cell is not None and slice_.scored
        else "",
        "scored": f"{slice_.scored:,}",
        "users": count(slice_.keys, "user"),
    }


def _evidence(status: ControllerStatus) -> Table:
    """Every cell with its numbers."""
    heads = ("slice", "clause", "value", "interval", "limit", "noise floor", "e-value")
    heads = (*heads, "alarm threshold", "return e-value", "return threshold", "requests")
    rows = [
        (place(slice_.name, 60), *_numbers(cell, summary.returns(slice_)))
        for slice_ in summary.ordered(status.slices)
        for cell in slice_.cells
    ]
    return Table("Evidence", heads, rows, range(2, len(heads)))


def _numbers(cell: CellStatus, away: bool) -> Iterator[str]:
    """The columns of a cell; those of the return test where its slice is or was diverted."""
    unit = line(cell.unit, 20)
    yield line(cell.clause, 60)
    yield f"{format.measured(cell.value)} {unit}".rstrip()
    yield " to ".join(map(format.measured, cell.interval)) if cell.interval else ""
    yield summary.limit(cell)
    yield format.measured(cell.floor) if cell.floor is not None else ""
    yield from map(format.evidence, summary.nearest(cell))
    back = (cell.log_below, cell.log_leave_price)
    yield from map(format.evidence, back) if away else ("", "")
    yield f"{cell.n:,}"


def _decisions(status: ControllerStatus) -> Table:
    """The latest decisions, the latest first."""
    latest = status.transitions[-_MOVES:]
    more = f", {len(latest)} of {status.moves:,}" if status.moves > len(latest) else ""
    heads = ("time", "slice", "decision", "reason", "value", "limit", "e-value")
    heads = (*heads, "alarm threshold", "requests", "users")
    rows = [_decision(t, status.now) for t in reversed(latest)]
    return Table(f"Last decisions (UTC{more})", heads, rows, range(4, len(heads)))


def _decision(t: Transition, now: float) -> tuple[str, ...]:
    before, after = line(t.before, 40), line(t.after, 40)
    still = t.before == "quarantined" and t.after == "probation"  # the route stays as it is
    kept = t.acted or still or after.partition(",")[0] in ("active", "suspect")
    change = f"{before} → {'' if kept else 'would be '}{after}" if before != after else after
    who = f"{line(t.actor, 40)}: " if t.actor != "servanda" else ""
    known = t.cell is not None and t.value == t.value
    numbers = [
        format.measured(t.value) if known else "",
        format.figure(t.limit) if known and t.limit == t.limit else "",
        *(format.evidence(e) if e == e else "" for e in (t.log_evidence, t.log_price)),
        *(f"{n:,}" if t.n else "" for n in (t.n, t.keys)),
    ]
    reason = who + line(t.reason, 300)
    return (format.clock(t.at, now), place(t.slice, 60), change, reason, *numbers)


def _traffic(status: ControllerStatus) -> Table:
    """The replies and the load of each pool."""
    totals: Counter[str] = Counter()  # requests by the pool whose reply they got
    for key, n in summary.counted(status, "answers").items():
        totals[key.rpartition("\t")[2]] += n
    heads = ("pool", "requests", "in flight", "peak", "capacity", "room", "condition")
    rows = []
    for name, pool in status.pools.items():
        condition = ["! circuit breaker open"] if pool.open else []
        condition += [summary.replicas(pool)] if pool.replicas else []
        condition += summary.happened(status, name)
        numbers = (totals[name], pool.in_flight, pool.peak, pool.most, pool.headroom)
        texts = ("" if n is None else f"{n:,}" for n in numbers)
        rows.append((name, *texts, " · ".join(condition)))
    return Table("Traffic", heads, rows, range(1, 6))
