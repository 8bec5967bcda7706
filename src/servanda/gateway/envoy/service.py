# The services that Envoy asks, in one process: gRPC at one address, HTTP at another.
#
# The routes are those of a leader, followed by its numbered snapshots: no request waits for the
# leader, and an expired snapshot is handled by the rules of the contract.  Of several leaders one
# leads: the one that gave the last routes is asked next, and another one if it fails.

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from importlib import import_module
from itertools import count
from typing import Any
from urllib.parse import quote

import httpx2
from starlette.types import Receive, Scope, Send

from servanda.engines.http_policy import server_url
from servanda.engines.server.sockets import address
from servanda.engines.tls import trusted
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.http.error_replies import (
    ErrorReply,
    outside_envelope,
    send_error,
    send_whole,
)
from servanda.gateway.http.headers import SESSIONS
from servanda.gateway.http.listener import Listener, bind
from servanda.gateway.http.tasks import end
from servanda.gateway.proxy.pools.upstreams import COMPLETION_PATHS
from servanda.gateway.proxy.request import CompletionRequest
from servanda.gateway.routing.model import Decision, RequestFacts, snapshot_of
from servanda.gateway.routing.router import Router, Sessions, pseudonym

_FOLLOWED = "routes are followed"
_EVERY_S, _ANSWER_S = 1.0, 5.0
_TOKENS = (
    "! the contract has slices or an envelope by request.prompt_tokens: they apply only to prompts "
    "of token ids, because no tokenizer is asked here"
)


class LeaderRoutes:
    """The latest snapshot of the leader.

    Args:
        urls: admin listeners of the leaders, of which one leads; at least one.
        key: of a holder with the role gateway.
        say: prints a line: what fails, once until it succeeds.

    Raises:
        ContractError: not an http or https URL.
    """

    def __init__(self, urls: Sequence[str], key: str, say: Callable[[str], None]) -> None:
        for url in urls:
            parts = server_url(url)
            if parts is None or "@" in parts.netloc:
                raise ContractError(
                    "--leader takes a URL of http or https, without a key",
                    hint="write http://HOST:PORT, as `servanda serve` prints for its page",
                )
        self._leaders = deque(url.rstrip("/") for url in urls)
        self._headers = {"authorization": f"Bearer {key}"}
        self._say, self._said, self._now = say, "", SteadyClock()
        self.router = Router(None)

    @property
    def ready(self) -> bool:
        """Whether a snapshot was received."""
        return self.router.snapshot is not None

    def decide(self, facts: RequestFacts) -> Decision:
        """The route of a request, by the rules of the leader's own `decide`."""
        return self.router.decide(facts, now=self._now())

    async def run(self) -> None:
        """Follow until cancelled."""
        async with httpx2.AsyncClient(
            timeout=_ANSWER_S, trust_env=False, verify=trusted(), follow_redirects=False
        ) as client:
            while True:
                self._report(await self._ask(client))
                await asyncio.sleep(_EVERY_S)

    async def _ask(self, client: httpx2.AsyncClient) -> str:
        """Ask the leaders in turn, until one has routes; returns what is wrong with each."""
        problems: list[str] = []
        for _ in range(len(self._leaders)):
            problem = await self._ask_one(client, self._leaders[0])
            if not problem:
                return ""
            problems.append(f"{self._leaders[0]} {problem}")
            self._leaders.rotate(-1)
        return "; ".join(sorted(problems))

    async def _ask_one(self, client: httpx2.AsyncClient, leader: str) -> str:
        """Ask a leader for a later snapshot; returns the problem."""
        headers, known = dict(self._headers), self.router.snapshot
        if known is not None:
            headers["if-none-match"] = f'"{known.version}"'
        asked_at = self._now()
        try:
            reply = await client.get(f"{leader}/v1/route/snapshot", headers=headers)
        except httpx2.HTTPError as error:
            return f"does not respond: {type(error).__name__}"
        if reply.status_code == 304:
            return ""
        if reply.status_code in (401, 403):
            return "refuses the key: SERVANDA_GATEWAY_KEY is that of a holder with role gateway"
        if reply.status_code == 503:
            return "does not lead now"
        try:
            snapshot = snapshot_of(reply.json())
            at = parsedate_to_datetime(reply.headers["date"]).timestamp()
        except (EvidenceError, ValueError, KeyError):
            return f"is no leader: status {reply.status_code} at /v1/route/snapshot"
        # a leader that has just lost the lead may still have older routes
        if known is not None and snapshot.version < known.version and asked_at < known.valid_until:
            return f"has older routes, number {snapshot.version} after {known.version}"
        # for the leader's duration, by our own clock, even if the two clocks differ
        left_s = snapshot.valid_until - at
        self.router = Router(replace(snapshot, valid_until=asked_at + left_s), snapshot.without)
        return ""

    def _report(self, problem: str) -> None:
        if problem and problem != self._said:
            self._say(f"! no routes, asked every second: {problem}")
        if not problem and self._said != _FOLLOWED:
            followed = self.router.snapshot.name if self.router.snapshot is not None else ""
            self._say(f"routes of {followed} are followed")
            if self.router.counts_tokens:
                self._say(_TOKENS)
        self._said = problem or _FOLLOWED


_GRACE_S = 5
_MOST = 4 << 20  # bytes of a gRPC message of a check: Envoy's max_request_bytes is below it
AT = "/authz"  # path_prefix of the HTTP service in Envoy's configuration
_PERMISSION_DENIED = 7
_PARTIAL = "x-envoy-auth-partial-body"
_CHUNK = 62 << 10  # bytes of a streamed part; Envoy recommends less than 64 KiB
_BUFFERED, _PARTLY, _DUPLEX = 2, 3, 4  # of ProcessingMode.BodySendMode
PREFIX = "x-servanda-"
MOST = 32 << 20  # bytes of a body, as in a gateway of servanda
_SESSIONS, _SESSION_S, _NAME = 100_000, 3600.0, 256


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
        await end({following})
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


# Envoy's external authorization: one check of a request, by gRPC or by HTTP.
#
# Nothing is authorized here: every request is allowed, with the headers that route it, but for
# those that the contract or the gateway refuses.


class Authorization:
    """The gRPC service envoy.service.auth.v3.Authorization."""

    def __init__(self, routes: RequestRoutes) -> None:
        self._routes = routes
        self._pb: Any = import_module("envoy.service.auth.v3.external_auth_pb2")
        self._grpc: Any = import_module("envoy.service.auth.v3.external_auth_pb2_grpc")

    def join(self, server: Any) -> None:
        self._grpc.add_AuthorizationServicer_to_server(self, server)

    async def Check(self, request: Any, context: Any) -> Any:
        """Allow a request, with its headers; or deny it with a status and a body."""
        http = request.attributes.request.http
        headers = dict(http.headers) | {h.key: _text(h) for h in http.header_map.headers}
        # an empty body and one that Envoy was not told to send look alike
        body = http.raw_body or http.body.encode() or None
        reply = self._pb.CheckResponse()
        try:
            ask = Ask(http.path, headers, body, headers.get(_PARTIAL) != "true")
            routed = self._routes.headers(ask)
        except ErrorReply as error:
            reply.status.code = _PERMISSION_DENIED
            reply.denied_response.status.code = error.status
            reply.denied_response.body = error.body.decode()
            media = reply.denied_response.headers.add().header
            media.key, media.value = "content-type", "application/json"
            return reply
        reply.ok_response.headers_to_remove.extend(foreign(headers))
        for name, value in routed.items():
            option = reply.ok_response.headers.add()
            option.header.key, option.header.value = name, value
            option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
        return reply


def _text(header: Any) -> str:
    return header.value or header.raw_value.decode("latin-1")


async def check_http(routes: RequestRoutes, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a check by HTTP: 200 with the headers that route the request, or its refusal.

    The path is that of the request below `AT`.
    """
    body = bytearray()
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MOST:
                raise ErrorReply(413, f"a body has {MOST >> 20} MiB at most", "too_large")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        whole, path = headers.get(_PARTIAL) != "true", scope["path"].removeprefix(AT)
        routed = routes.headers(Ask(path, headers, bytes(body) or None, whole))
    except ErrorReply as error:
        await send_error(send, error)
        return
    more = [(name.encode(), value.encode()) for name, value in routed.items()]
    await send_whole(send, 200, more, b"")


# Envoy's external processor: a stream per request, whose headers and body come as messages.
#
# Body modes: NONE and STREAMED route by the headers alone, because Envoy forwards them before the
# body is read. BUFFERED routes when the body is there. FULL_DUPLEX_STREAMED hands the body over,
# and it is sent back behind the headers. Responses are not read.


class Processor:
    """The gRPC service envoy.service.ext_proc.v3.ExternalProcessor."""

    def __init__(self, routes: RequestRoutes) -> None:
        self._routes = routes
        base = "envoy.service.ext_proc.v3.external_processor_pb2"
        self._pb: Any = import_module(base)
        self._grpc: Any = import_module(f"{base}_grpc")

    def join(self, server: Any) -> None:
        self._grpc.add_ExternalProcessorServicer_to_server(self, server)

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Route one request; the stream ends with its request, and Envoy goes on without us."""
        ask, body, mode = Ask("", {}), bytearray(), 0
        async for message in requests:
            if message.HasField("protocol_config"):
                mode = message.protocol_config.request_body_mode
            kind = message.WhichOneof("request")
            replies: Iterator[Any] = iter(())
            done = False
            try:
                if kind == "request_headers":
                    headers = {h.key: _text(h) for h in message.request_headers.headers.headers}
                    ask = Ask(headers.get(":path", ""), headers, id=self._routes.new_id())
                    done = message.request_headers.end_of_stream
                    if done or mode not in (_BUFFERED, _PARTLY, _DUPLEX):
                        replies, done = iter([self._reply(kind, ask)]), True
                    elif mode != _DUPLEX:
                        go_on = self._pb.ProcessingResponse()
                        go_on.request_headers.response.status = self._pb.CommonResponse.CONTINUE
                        replies = iter([go_on])
                elif kind == "request_body":
                    body += message.request_body.body
                    if len(body) > MOST:
                        raise ErrorReply(413, f"a body has {MOST >> 20} MiB at most", "too_large")
                    done = message.request_body.end_of_stream
                    if mode == _DUPLEX:
                        if done:
                            replies = self._duplex(ask, bytes(body), end=True)
                    else:  # one message; a partial one does not end the stream
                        whole = done or mode != _PARTLY
                        full = replace(ask, body=bytes(body), whole=whole)
                        replies, done = iter([self._reply(kind, full)]), True
                elif kind == "request_trailers":
                    reply = self._pb.ProcessingResponse()
                    reply.request_trailers.SetInParent()
                    replies = iter([*self._duplex(ask, bytes(body), end=False), reply])
                    done = True
                for reply in replies:
                    yield reply
            except ErrorReply as error:
                yield self._refusal(error)
                return
            if done:
                return

    def _reply(self, part: str, ask: Ask) -> Any:
        """A reply to the headers or the body, with the route."""
        reply = self._pb.ProcessingResponse()
        self._route(getattr(reply, part).response, ask)
        return reply

    def _duplex(self, ask: Ask, body: bytes, *, end: bool) -> Iterator[Any]:
        """The headers, then the body as it came, in parts.

        Args:
            end: whether the body ends the request; otherwise trailers do.
        """
        yield self._reply("request_headers", replace(ask, body=body))
        for at in range(0, max(1, len(body)), _CHUNK):
            reply = self._pb.ProcessingResponse()
            part = reply.request_body.response.body_mutation.streamed_response
            part.body = body[at : at + _CHUNK]
            part.end_of_stream = end and at + _CHUNK >= len(body)
            yield reply

    def _route(self, common: Any, ask: Ask) -> None:
        """The headers that route a request; Envoy then chooses its route again."""
        mutation = common.header_mutation
        for name, value in self._routes.headers(ask).items():
            option = mutation.set_headers.add()
            option.header.key, option.header.raw_value = name, value.encode()
            option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
        mutation.remove_headers.extend(foreign(ask.headers))
        common.clear_route_cache = True

    def _refusal(self, error: ErrorReply) -> Any:
        reply = self._pb.ProcessingResponse()
        reply.immediate_response.status.code = error.status
        reply.immediate_response.body = error.body
        reply.immediate_response.details = error.code
        media = reply.immediate_response.headers.set_headers.add().header
        media.key, media.raw_value = "content-type", b"application/json"
        return reply


# One request of Envoy, and the headers that route it.


@dataclass(frozen=True)
class Ask:
    """A request as Envoy describes it.

    Args:
        path: with its query; headers: by lower-case name, the last of repeated ones.
        body: as far as it was sent; None: it was not sent here.
        whole: whether this is all of the body.
        id: of a request that has one already; "": a new one is made.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes | None = None
    whole: bool = True
    id: str = ""


class RequestRoutes:
    """The headers that route requests, decided by the leader's snapshot.

    Raises (of `headers`):
        ErrorReply: the request is refused, as a gateway of servanda refuses it.
    """

    def __init__(self, leader: LeaderRoutes) -> None:
        self._leader = leader
        self._sessions = Sessions(_SESSIONS, _SESSION_S, time.monotonic)
        self._prefix, self._count = secrets.token_hex(6), count(1)

    def new_id(self) -> str:
        """An id of a request; the client's own could repeat."""
        return f"{self._prefix}-{next(self._count):x}"

    def headers(self, ask: Ask) -> dict[str, str]:
        """Pool, id, mirror, sample and its probability, as headers for the routes of Envoy."""
        name = ask.id or self.new_id()
        path = ask.path.partition("?")[0]
        if path not in COMPLETION_PATHS:  # these are served by one pool, as in our own gateway
            return _headers(name, self._without, None, "path")
        if not ask.whole:  # its labels cannot be read: it may belong to a diverted slice
            return _headers(name, self._without, None, "partial body")
        chat = path == "/v1/chat/completions"
        request = None if ask.body is None else CompletionRequest(ask.body, chat)
        holder = pseudonym(b"envoy", ask.headers.get("authorization", ""))
        session = next((v for n in SESSIONS if (v := ask.headers.get(n.decode()))), "")[:_NAME]
        facts = self._facts(name, path, request, holder, session)
        decision = self._leader.decide(facts)
        if decision.pool is None:
            snapshot = self._leader.router.snapshot
            promised = snapshot.prompt_tokens if snapshot is not None else None
            raise outside_envelope(facts.prompt_tokens, promised)
        if session:
            self._sessions.put(facts.sticky, decision.pool)
        return _headers(name, decision.pool, decision, decision.reason)

    @property
    def _without(self) -> str:
        snapshot = self._leader.router.snapshot
        return "stable" if snapshot is None else snapshot.without

    def _facts(
        self, name: str, path: str, request: CompletionRequest | None, holder: str, session: str
    ) -> RequestFacts:
        snapshot = self._leader.router.snapshot
        user = request.user if request is not None else ""
        words = request.conversation() if request is not None else ""
        # session names are per client: no session is shared between keys
        kinds = (("session", session), ("user", user), ("chat", words))
        sticky = next((f"{kind} {holder} {value}" for kind, value in kinds if value), name)
        sources = snapshot.labels if snapshot is not None else {}
        labels = request.labels(sources, "", path) if request is not None else {}
        return RequestFacts(
            request=name,
            sticky=sticky,
            labels=labels,
            prompt_tokens=request.known_tokens if request is not None else None,
            session=self._sessions.pool(sticky) if session else None,
        )


def foreign(names: Iterable[str]) -> list[str]:
    """Headers that a client sent in our name, without those that are overwritten."""
    ours = _headers("", "", None, "")
    return sorted({n for n in names if n.startswith(PREFIX) and n not in ours})


def _headers(name: str, pool: str, decision: Decision | None, reason: str) -> dict[str, str]:
    """All of them, always: a client's own value of one is then overwritten."""
    mirrored = decision is not None and decision.mirrored
    sampled = decision is not None and decision.sampled
    return {
        "x-servanda-pool": pool,
        "x-servanda-decision": name,
        "x-servanda-mirrored": str(mirrored).lower(),
        "x-servanda-sampled": str(sampled).lower(),
        "x-servanda-chance": repr(decision.chance if decision is not None else 0.0),
        "x-servanda-reason": quote(reason, safe=" =<>.,"),  # the name of a slice may be any text
    }
