# One request for a completion, from its body to the last byte of its reply.
#
# All decisions about evidence are made before dispatch: the pool, whether the request is sampled,
# and the logprobs requested.  The response changes none of them.  A reply that has begun comes from
# one server to its end.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import closing
from time import perf_counter

from servanda.gateway.http import headers as named
from servanda.gateway.http.error_replies import ErrorReply, Header, outside_envelope
from servanda.gateway.proxy.counters import FAILED, Guard, add
from servanda.gateway.proxy.exchange import Exchange, forward, is_packed, is_stream
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.logprob_capture import LogprobCapture
from servanda.gateway.proxy.logprob_request import (
    BAD_REQUEST,
    LogprobRequest,
    allowed_best,
    logprob_request_of,
    mirrored,
)
from servanda.gateway.proxy.pools.server_pool import ENDED, PoolServer, in_flight
from servanda.gateway.proxy.pools.upstreams import (
    BROKEN,
    ClientError,
    Response,
    UpstreamError,
    read_body,
    read_start,
)
from servanda.gateway.proxy.request import CompletionRequest, RoutedRequest
from servanda.gateway.proxy.request_log import OpenRow
from servanda.gateway.routing.model import Pool
from servanda.traces.request_log import BREAKER

_WAITS = ("reply", "part", "total")  # phases whose timeout is a failure of the pool
_REPLICAS = 2  # of a pool that one request may fail at, beside those that refuse connections
_TURN = 8 << 10  # bytes of a stream that are parsed before other tasks run
# client headers that a sampled request replaces
_OF_ITS_OWN = frozenset(("accept-encoding", *named.OF_A_BODY))
# reason of a missing reply -> status, message, code and retry_s for the client
_NO_REPLY: Mapping[str, tuple[int, str, str, int | None]] = {
    "connect": (502, "cannot be reached; try again", "no_upstream", 1),
    "broken": (502, "broke its reply off; try again", "broken", 1),
    "timeout": (504, "did not answer in time; ask for less", "timeout", None),
    "5xx": (502, "fails; try again", "upstream_fails", 1),
}


class CompletionHandler:
    """Handles requests of /v1/completions and /v1/chat/completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._mirror = gateway, Mirror(gateway)

    async def handle(self, exchange: Exchange, path: str) -> None:
        request = CompletionRequest(await exchange.body(), chat=path == "/v1/chat/completions")
        exchange.timeouts.listen(exchange.receive)
        routed = await self._gateway.route(request, exchange, path)
        await _Completion(self._gateway, self._mirror, exchange, routed).answer()


class _AskStable(Exception):  # noqa: N818 - what is to be done
    """Infer gave no reply and stable may be tried; its text is the `why` of `UpstreamError`."""


class _Completion:
    """One request, with the decisions about it."""

    def __init__(
        self, gateway: Gateway, mirror: Mirror, exchange: Exchange, routed: RoutedRequest
    ) -> None:
        self._gateway, self._mirror = gateway, mirror
        self._exchange, self._routed = exchange, routed
        self._path = exchange.with_query(routed.path)
        self._capture: LogprobCapture | None = None
        self._guarded: _GuardedCapture | None = None
        self._pool: Pool | None = None  # pool of the client's reply; None before it begins
        # servers without a reply and why, until another one has handled the request
        self._failures: list[tuple[PoolServer, str]] = []
        self._tried: list[PoolServer] = []
        self._row: OpenRow | None = None
        self._logprob_request: LogprobRequest | None = None

    async def answer(self) -> None:
        gateway, exchange, routed = self._gateway, self._exchange, self._routed
        decision, counts, observers = routed.decision, gateway.counts, gateway.observers
        try:
            if decision.pool is None:
                snapshot = gateway.snapshot
                promised = snapshot.prompt_tokens if snapshot is not None else None
                raise outside_envelope(routed.facts.prompt_tokens, promised)
            server = self._enter(decision.pool)
            away, line = BREAKER if server.name != decision.pool else "", None
            with observers.counters:
                if away:
                    add(counts.failovers, away)
            with observers.log:
                line = gateway.assignments.assign(routed, gateway.snapshot, server.pool, away)
            with observers.mirror:
                if decision.mirrored:
                    self._mirror.send(routed)
            try:
                await self._answer_from(server)
            except _AskStable as failure:
                with observers.counters:
                    add(counts.failovers, str(failure))
                with observers.log:
                    gateway.assignments.failed_over(line)
                await self._answer_from(self._enter("stable"))
        finally:
            self._compare(answered=False)
            with observers.counters:
                counts.replied(decision, self._pool, exchange.first_s)
                counts.overhead.add(exchange.busy_s)

    @property
    def _session(self) -> str:
        """The request's explicit session, "" without one."""
        return self._routed.facts.sticky if self._exchange.head.session else ""

    def _enter(self, pool: Pool) -> PoolServer:
        """The server of the request; an explicit session stays on one pool, and on one server."""
        server = self._gateway.enter(pool, self._exchange.client, self._session)
        if self._session:
            self._gateway.sessions.put(self._session, server.pool)
        return server

    async def _answer_from(self, first: PoolServer) -> None:
        """Forward the request to a pool, to one of its servers after another until one replies.

        Raises:
            _AskStable: infer gave no reply, and stable may be tried.
        """
        gateway, observers, pool = self._gateway, self._gateway.observers, first.pool
        self._row, sampled = None, None
        if pool == "infer":
            sampled = self._launch(first)
        with observers.counters:
            self._move(pool, 1)
        try:
            server: PoolServer | None = first
            while server is not None:
                self._lost, self._capture, self._logprob_request = "cancelled", None, sampled
                server = await self._attempt(server)
        finally:
            with observers.counters:
                self._move(pool, -1)
            with observers.log:
                if self._row is not None:
                    capture = self._capture if self._lost == "cancelled" else None
                    gateway.resolve(self._row, self._routed, capture, self._lost)

    def _move(self, pool: Pool, by: int) -> None:
        """Count a request in flight, from 1 to -1."""
        counts, launches = self._gateway.counts, self._gateway.launches
        (counts.begun if by > 0 else counts.ended)(pool)
        if pool == "infer":
            launches.in_flight.move(self._routed.decision.slices, by)

    def _launch(self, first: PoolServer) -> LogprobRequest | None:
        """Open the row of the request, if it is sampled: one, whichever replica replies."""
        gateway, routed, sampled = self._gateway, self._routed, None
        if routed.decision.sampled and not routed.decision.mirrored:
            with gateway.observers.capture:
                sampled = gateway.logprob_request(routed.request, first)
        with gateway.observers.log:
            self._row = gateway.launches.launch(routed, gateway.snapshot, sampled)
        return sampled if self._row is not None else None

    async def _attempt(self, server: PoolServer) -> PoolServer | None:
        """Forward the request to a server; returns the one to try next, None after a reply."""
        self._tried.append(server)
        if self._row is not None and self._gateway.pools[server.pool].checked:
            self._row.fields["x-replica"] = server.url
        with in_flight(server):
            try:
                await self._forward_from(server)
            except UpstreamError as error:
                self._lost = error.why
                self._gateway.count_reply(server, error.why)
                return await self._give_up_on(server, error.why)
            except asyncio.CancelledError:
                return await self._cancelled(server)
        return None

    async def _forward_from(self, server: PoolServer) -> None:
        pool = server.pool
        response = await self._send(server)
        status, packed = response.status, is_packed(response)
        if self._logprob_request is not None and (status in BAD_REQUEST or packed):
            # perhaps the added fields are refused: the original request is sent
            with self._gateway.observers.counters:
                add(self._gateway.counts.reflexes, "refused sample")
            self._lost, self._logprob_request = "packed" if packed else "refused", None
            with closing(response):
                text = await read_body(response, self._exchange.limits.reply_bytes)
            response = await self._send(server)
            with self._gateway.observers.capture:
                if response.status == 200:  # otherwise the text may quote the client
                    server.best = allowed_best(text, server.best)
        if self._logprob_request is not None and response.status != 200:
            self._lost, self._logprob_request = f"status {response.status}", None
        with closing(response):
            self._check_status(server, response)
            self._pool = pool
            if response.status not in BROKEN:
                self._compare(answered=True)
            long = (response.content_length or 0) > self._exchange.limits.reply_bytes
            if self._logprob_request is not None and not long:
                await self._forward_sampled(server, response)
            else:
                if self._logprob_request is not None:
                    self._lost = "overlong"
                headers = self._with_decision(named.client_headers(response.raw_headers), pool)
                await forward(self._exchange, response, headers, server.about)
        if response.status not in BROKEN:
            server.breaker.succeeded(self._exchange.client)
        self._gateway.count_reply(server, f"{response.status // 100}xx")

    async def _send(self, server: PoolServer) -> Response:
        exchange, about, sampled = self._exchange, server.about, self._logprob_request
        headers = named.upstream_headers(exchange.headers, about.key, keeps=not exchange.holder)
        if sampled is not None:
            headers = [(name, value) for name, value in headers if name not in _OF_ITS_OWN]
            headers.append(("accept-encoding", "identity"))
        exchange.timeouts.wait_for("reply", about.first_byte_s)
        exchange.pause()
        exchange.sent = perf_counter()
        body = (sampled or self._routed.request).body
        response = await server.send("POST", self._path, headers, body)
        exchange.resume()
        return response

    def _check_status(self, server: PoolServer, response: Response) -> None:
        """Raise on an error that another server may not have, and on a redirect."""
        status, pool = response.status, server.pool
        if status in BROKEN:
            if self._gateway.has_fallback(pool) or self._may_retry(server, "5xx"):
                raise UpstreamError("5xx")
            server.breaker.abandoned()  # it may be the request, and no other server is left
        elif server.breaker.state != "closed":
            server.breaker.succeeded(self._exchange.client)
        if 300 <= status < 400 and status != 304:
            self._gateway.count_reply(server, "3xx")
            message = f"{pool} answers with a redirect, and none is followed: correct its url"
            raise ErrorReply(502, message, "redirect")

    async def _forward_sampled(self, server: PoolServer, response: Response) -> None:
        """Forward a sampled reply without the added logprobs."""
        exchange, limits = self._exchange, self._exchange.limits
        assert self._logprob_request is not None
        capture = LogprobCapture(self._logprob_request, limits.line_bytes, limits.reply_bytes)
        own = _GuardedCapture(capture, self._gateway.observers.capture)
        self._capture, self._guarded = capture, own
        raw = named.client_headers(response.raw_headers, rewritten=True)
        headers = self._with_decision(raw, "infer")
        if not is_stream(response):
            body, whole = await read_start(response, limits.reply_bytes)
            if not whole:  # not known from a content-length
                self._lost, self._capture = "overlong", None
                await forward(exchange, response, headers, server.about, body)
                return
            body = own.reply(body)
            headers.append((b"content-length", str(len(body)).encode()))
            exchange.resume()
            await exchange.whole(response.status, headers, body)
            exchange.pause()
            return
        await exchange.start(response, headers)
        exchange.pause()
        exchange.timeouts.wait_for("part", server.about.first_byte_s)
        try:
            async for data in response.content.iter_any():
                for at in range(0, len(data), _TURN):
                    if at:  # let other tasks run during a stream without pauses
                        await asyncio.sleep(0)
                    if part := own.feed(data[at : at + _TURN]):
                        await exchange.part(part)
                exchange.timeouts.wait_for("part", server.about.idle_s)
        except (ClientError, OSError):
            raise UpstreamError("broken") from None
        if rest := own.rest():
            await exchange.part(rest)
        await exchange.end()

    def _may_retry(self, server: PoolServer, why: str) -> bool:
        """Whether another replica of the pool can be tried.

        Any number of those that refuse connections, which takes no time; of others few, because the
        request may be at fault.
        """
        pool = self._gateway.pools[server.name]
        others = sum(failed.name == server.name for failed, _ in self._failures)
        few = why == "connect" or others + 1 < _REPLICAS
        return few and pool.has_another(self._tried)

    async def _give_up_on(self, server: PoolServer, why: str) -> PoolServer | None:
        """Handle a missing or partial reply; returns the replica to try next, if any."""
        gateway, exchange, over = self._gateway, self._exchange, self._exchange.timeouts.over
        pool = gateway.pools[server.name]
        if why in ENDED:
            pool.suspect(server, why)
        if not exchange.begun:
            self._pool = None  # the client has received no part of the reply
        if not exchange.begun and not over:
            another = None
            if self._may_retry(server, why):
                another = pool.enter(exchange.client, self._session, self._tried)
            if another is not None or gateway.has_fallback(server.name):
                if why == "connect":
                    gateway.record_failure(server, why, exchange.client)
                else:
                    self._failures.append((server, why))
                if another is not None:
                    return another
                raise _AskStable(why)
        if why == "timeout" and exchange.begun and over:
            server.breaker.abandoned()  # a long response or a slow reader is no failure of the pool
        else:
            self._gateway.record_failure(server, why, exchange.client)
        status, message, code, retry_s = _NO_REPLY[why]
        error = ErrorReply(status, f"{server.name} {message}", code, retry_s)
        if not exchange.begun:
            raise error
        if self._guarded is not None and (held := self._guarded.held):
            await exchange.part(held)  # as an unsampled client gets the part of an event
        await exchange.give_up(error)
        return None

    def _compare(self, *, answered: bool) -> None:
        """Record the failures of servers once another one has handled the same request."""
        failures, self._failures = self._failures, []
        for server, why in failures:
            if answered:
                self._gateway.record_failure(server, why, self._exchange.client)
            else:  # a request that fails everywhere is at fault itself
                server.breaker.abandoned()

    async def _cancelled(self, server: PoolServer) -> PoolServer | None:
        """Handle a timeout; any other cancellation is propagated."""
        exchange, why = self._exchange, self._exchange.timeouts.why
        whole = self._capture is not None and self._capture.whole
        if why and not whole:  # a complete response that was only being forwarded counts
            self._lost = "timeout" if why in _WAITS else why
        if why in _WAITS:
            self._gateway.count_reply(server, "timeout")
            exchange.timeouts.again()
            return await self._give_up_on(server, "timeout")
        server.breaker.abandoned()
        self._gateway.count_reply(server, "2xx" if whole else "gone")
        if why != "client":
            raise
        exchange.timeouts.again()
        exchange.cut()
        return None

    def _with_decision(self, headers: list[Header], pool: Pool) -> list[Header]:
        if self._gateway.config.shows:
            headers.append((b"x-servanda-decision", self._routed.facts.request.encode()))
            headers.append((b"x-servanda-pool", pool.encode()))
        return headers


class _GuardedCapture:
    """A capture on the path of a user: once it fails, the rest of the reply is forwarded unchanged.

    Without a loss: the bytes that the capture holds back are kept here, too.

    Attributes:
        held: the received bytes of which the client has no part yet.
    """

    def __init__(self, capture: LogprobCapture, guard: Guard) -> None:
        self._capture, self._guard = capture, guard
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def held(self) -> bytes:
        return b"".join(self._parts)

    def reply(self, body: bytes) -> bytes:
        return self._call(self._capture.reply, body)

    def feed(self, part: bytes) -> bytes:
        return self._call(self._capture.feed, part)

    def rest(self) -> bytes:
        return self._call(lambda _: self._capture.rest(), b"")

    def _call(self, strip: Callable[[bytes], bytes], part: bytes) -> bytes:
        capture, stripped = self._capture, None
        if capture.broken == FAILED:
            return part
        self._parts.append(part)
        self._size += len(part)
        with self._guard:
            stripped = strip(part)
            if capture.held < self._size:
                self._parts = [self.held[self._size - capture.held :]]
                self._size = capture.held
        if stripped is None:
            capture.broken, stripped, self._parts = FAILED, self.held, []
        return stripped


# Mirroring: requests that stable serves are also sent to infer, and its responses are discarded.
#
# It has its own limits, and one retry, to learn how many top-k logprobs infer returns.  Fields with
# side effects and the identity of the client are removed.


class Mirror:
    """Sends mirrored requests to infer."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = gateway.config.limits
        self._in_flight = 0
        self._tokens = max(1.0, self._limits.mirror_per_s)
        self._at = gateway.clock()

    def send(self, routed: RoutedRequest) -> None:
        """Mirror a request to infer within the limits; never fails, and returns at once."""
        gateway = self._gateway
        readable = len(routed.request.body) <= self._limits.read_bytes
        # a request beyond the limits is not dispatched, so its response is not missing
        server = None
        if readable and self._room():
            server = gateway.pools["infer"].enter(routed.client)
        if server is None:
            gateway.counts.mirror_dropped += 1
            return
        logprob_request = None
        if routed.decision.sampled:
            logprob_request = gateway.logprob_request(routed.request, server, mirrored=True)
        row = gateway.launches.launch(routed, gateway.snapshot, logprob_request)
        if row is not None and gateway.pools["infer"].checked:
            row.fields["x-replica"] = server.url
        gateway.counts.mirrored += 1
        self._in_flight += 1
        work = self._ask(server, routed, logprob_request, row)
        gateway.run_in_background(gateway.observers.mirror, work)

    def _room(self) -> bool:
        """Whether the limits allow one more: concurrent requests, and requests per second."""
        limits, now = self._limits, self._gateway.clock()
        most = max(1.0, limits.mirror_per_s)
        self._tokens = min(most, self._tokens + (now - self._at) * limits.mirror_per_s)
        self._at = now
        if self._in_flight >= limits.mirror_in_flight or self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    async def _ask(
        self,
        server: PoolServer,
        routed: RoutedRequest,
        logprob_request: LogprobRequest | None,
        row: OpenRow | None,
    ) -> None:
        gateway, lost, capture = self._gateway, "cancelled", None
        server.in_flight += 1
        try:
            body = logprob_request.body if logprob_request else mirrored(routed.request)
            if body is None:
                server.breaker.abandoned()
                return
            status, text = await self._post(server, routed, body)
            if logprob_request is not None and status in BAD_REQUEST:
                best = allowed_best(text or b"", server.best)
                if best < server.best:  # retry with the number that infer allows
                    request, about = routed.request, server.about
                    logprob_request = logprob_request_of(request, about, best, mirrored=True)
                    status, text = await self._post(server, routed, logprob_request.body)
                    server.best = best if status == 200 else server.best
            lost = f"status {status}"
            if status == 200 and text is None:
                lost = "packed"
            elif status == 200 and text is not None and logprob_request is not None:
                capture = LogprobCapture(logprob_request, self._limits.line_bytes)
                _GuardedCapture(capture, gateway.observers.capture).reply(text)
        except asyncio.TimeoutError:
            lost = "timeout"
            gateway.record_failure(server, lost, routed.client)
        except UpstreamError as error:
            lost = error.why
            gateway.record_failure(server, lost, routed.client)
        finally:
            self._in_flight -= 1
            server.in_flight -= 1
            if row is not None:
                gateway.resolve(row, routed, capture, lost)

    async def _post(
        self, server: PoolServer, routed: RoutedRequest, body: bytes
    ) -> tuple[int, bytes | None]:
        """Status and body of a reply; None if it is compressed without having been requested."""
        seconds = min(server.about.first_byte_s, server.about.total_s)
        return await asyncio.wait_for(self._reply(server, routed, body), seconds)

    async def _reply(
        self, server: PoolServer, routed: RoutedRequest, body: bytes
    ) -> tuple[int, bytes | None]:
        headers = {**server.own_headers(), "x-servanda-mirror": "1"}
        response = await server.send("POST", routed.path, headers, body)
        with closing(response):
            text = await read_body(response, self._limits.reply_bytes)
        if response.status >= 500:
            self._gateway.record_failure(server, "5xx", routed.client)
        else:
            server.breaker.succeeded(routed.client)
        return response.status, None if is_packed(response) else text
