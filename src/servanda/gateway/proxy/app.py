# The application: its paths, authentication, and error replies to clients.
#
# Pure ASGI: streams are not wrapped.

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from servanda.errors import MeasurementError
from servanda.gateway.http import headers as named
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.http.error_replies import ErrorReply, send_error, send_whole
from servanda.gateway.http.tasks import end
from servanda.gateway.proxy.completion import CompletionHandler
from servanda.gateway.proxy.config import AllowedPaths
from servanda.gateway.proxy.counters import add
from servanda.gateway.proxy.exchange import ClientGone, Exchange, Timeouts, forward
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.pools.server_pool import PoolServer, problem_of
from servanda.gateway.proxy.pools.upstreams import BROKEN, COMPLETION_PATHS, Server, UpstreamError
from servanda.gateway.proxy.request_log import MESSAGE_ROWS
from servanda.gateway.routing.model import RequestFacts, snapshot_of
from servanda.gateway.routing.router import Router

# Sends rows to the controller and receives snapshots, at least once per second.
#
# Rows are sent again until the controller confirms that they are stored, so that it may die at any
# time; a snapshot is used if it is later than the last one.  A refused message is sent again with
# half its rows, down to none.  If one row is refused and an empty message is not, the row is lost
# and does not block the others.
#
# Of several controllers one leads.  The one that took the last message is sent the next one; if it
# does not lead any more, or does not respond, the next message is sent to another.


_SELDOM_S, _OFTEN_S = 1.0, 0.2  # between two messages: without rows, and with rows
_WAIT_S = 10.0
_MOST = 16 << 20  # bytes of a response
_SALT, _LARGEST = 64, 2**53  # bytes; an integer that every JSON reader can represent
# statuses that may mean an invalid row
_OF_A_ROW = (400, 413, 422, 500)
_DOES_NOT_LEAD = 503  # or cannot store anything now


class _Reply(msgspec.Struct):
    taken: int = 0
    version: int = 0
    snapshot: Any = None
    now: float = 0.0


_read = msgspec.json.Decoder(_Reply).decode


class ControllerSync:
    """Sends rows to a controller and receives snapshots.

    Args:
        controllers: empty: no controller; rows go only to the log.
    """

    def __init__(self, gateway: Gateway, controllers: Sequence[Server]) -> None:
        self._gateway, self._controllers = gateway, deque(controllers)
        self._ready = asyncio.Event()
        self._rows = MESSAGE_ROWS  # most rows of a message
        self._took = False  # whether to confirm a new snapshot
        self._heard_alone = False  # whether the last message had no rows and was accepted
        gateway.launches.on_ready = self._ready.set
        gateway.assignments.leads = bool(controllers)

    async def run(self) -> None:
        """Run until it is cancelled."""
        for controller in self._controllers:
            await controller.open()
        while True:
            well = False
            with self._gateway.observers.log:  # the routes are followed whatever cannot be sent
                well = await self.once()
            await asyncio.sleep(_OFTEN_S)
            took, self._took = self._took, False
            if self._controller is not None and self._controller.about.probe is not None:
                continue  # its address is not known yet: a retry costs nothing
            if not well or not (took or self._gateway.launches.waiting()):
                self._ready.clear()
                waits = self._ready.wait() if well else asyncio.Event().wait()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waits, _SELDOM_S)

    async def close(self) -> None:
        """Send the last rows, if the controller responds."""
        await self.once()
        for controller in self._controllers:
            await controller.close()

    @property
    def _controller(self) -> Server | None:
        """The one that is sent the next message."""
        return self._controllers[0] if self._controllers else None

    async def once(self) -> bool:
        """Send one message; returns whether there was a response."""
        gateway = self._gateway
        with gateway.observers.log:
            gateway.launches.sweep()
            if gateway.log is not None:
                gateway.log.flush()
        controller = self._controller
        if controller is None:
            gateway.launches.taken(gateway.launches.last)
            return True
        if (met := controller.about.probe) is not None:
            try:
                controller.about = met()
            except MeasurementError:
                return False
        rows, assigned = gateway.launches.waiting(self._rows), gateway.assignments.waiting()
        asked_at = gateway.now()
        try:
            status, text = await controller.ask(
                "/v1/follow", self._message(rows, assigned), _WAIT_S, _MOST
            )
        except UpstreamError:
            add(gateway.counts.reflexes, "no leader")
            self._controllers.rotate(-1)
            return False
        if status != 200:
            if status == _DOES_NOT_LEAD:
                self._controllers.rotate(-1)
            add(gateway.counts.reflexes, f"leader {status // 100}xx")
            if status in _OF_A_ROW:
                if len(rows) == 1 and self._heard_alone:
                    gateway.launches.refused()
                    add(gateway.counts.reflexes, "refused row")
                self._rows, self._heard_alone = len(rows) // 2, False
            return False
        try:
            self._accept(_read(text), asked_at)
        except Exception:  # whatever the error, it is sent again
            add(gateway.counts.reflexes, "odd snapshot")
            return False
        gateway.assignments.taken(assigned)
        self._heard_alone = not self._rows
        self._rows = min(max(1, 2 * self._rows), MESSAGE_ROWS)
        return True

    def _message(self, rows: list[bytes], assigned: list[dict[str, Any]]) -> bytes:
        gateway, launches = self._gateway, self._gateway.launches
        snapshot, counts = gateway.snapshot, {}
        with gateway.observers.counters:
            counts = gateway.report()
        return msgspec.json.encode(
            {
                "gateway": gateway.config.name,
                "start": gateway.started,
                "version": snapshot.version if snapshot is not None else 0,
                "first": launches.first,
                "rows": [Raw(row) for row in rows],
                "counts": counts,
                "assigned": assigned,
            }
        )

    def _accept(self, reply: _Reply, asked_at: float) -> None:
        """Apply a response.

        Args:
            asked_at: when it was requested: a snapshot is valid for the controller's duration from
                then on, by our own clock, even if the two clocks differ.
        """
        gateway = self._gateway
        gateway.launches.taken(min(reply.taken, gateway.launches.last))
        if reply.snapshot is None:
            return
        snapshot = snapshot_of(reply.snapshot)
        if len(bytes.fromhex(snapshot.salt)) > _SALT or not math.isfinite(snapshot.valid_until):
            raise ValueError("a snapshot has an end, and a salt that splits")
        if not 0 < snapshot.version < _LARGEST:
            raise ValueError("a snapshot has a number")
        if not (reply.now > 0 and math.isfinite(reply.now)):
            raise ValueError("a leader says by which time its snapshot ends")
        # an invalid snapshot must fail here, not in a user's request
        Router(snapshot).decide(RequestFacts("", ""), now=gateway.now())
        left_s = snapshot.valid_until - reply.now
        self._took = gateway.take(replace(snapshot, valid_until=asked_at + left_s))
        if not self._took:
            add(gateway.counts.reflexes, "old snapshot")


_ENDING = ErrorReply(503, "the gateway ends; try again", "ending", retry_s=1)
_ALLOWED_BY_KEY = "give a key of role client as `Authorization: Bearer KEY`"


class App:
    """The ASGI application of a gateway.

    Attributes:
        in_flight: number of requests in flight.
        draining: whether it is shutting down, so that no new requests should be sent.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._limits = gateway.config.limits
        self._total_s = max(pool.total_s for pool in gateway.config.pools.values())
        self._keys = gateway.config.keys or Keys()
        self._paths = AllowedPaths(*gateway.config.allow)
        self._completions, self._others = CompletionHandler(gateway), PassthroughHandler(gateway)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.in_flight, self.draining = 0, False
        self._of_key: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.gateway.open()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        config, clock = self.gateway.config, self.gateway.clock
        upstreams = (config.controller, *config.standbys) if config.controller else ()
        leaders = [Server("leader", upstream, clock) for upstream in upstreams]
        sync = ControllerSync(self.gateway, leaders)
        syncing = asyncio.ensure_future(sync.run())
        waiting = asyncio.ensure_future(self.gateway.wait_for_infer())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await end({syncing, waiting})
        await self.gateway.settle()
        await sync.close()
        await self.gateway.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/healthz":
            await send_whole(send, 200, [(b"content-type", b"text/plain")], b"ok\n")
            return
        if path == "/readyz":
            state = readiness(self.gateway, draining=self.draining)
            headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
            await send_whole(send, 200 if state.ready else 503, headers, msgspec.json.encode(state))
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        timeouts = Timeouts(self._total_s, self._loop)
        exchange = Exchange(scope, receive, send, timeouts, self._limits)
        if self.draining:
            # the client's next request reaches another gateway
            exchange.more.append((b"connection", b"close"))
        entered = False
        try:
            self._admit(exchange)
            self.in_flight += 1
            self._of_key[exchange.holder] += 1
            entered = True
            if path in COMPLETION_PATHS:
                if scope["method"] != "POST":
                    raise ErrorReply(405, f"{path} takes POST", "method")
                await self._completions.handle(exchange, path)
            elif path == "/v1/models" and scope["method"] == "GET":
                await self._others.list_models(exchange)
            else:
                self._paths.check(scope["method"], path, scope["raw_path"])
                await self._others.handle(exchange)
        except ErrorReply as error:
            await self._send_error(exchange, error)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            await self._cancelled(exchange)
        finally:
            exchange.timeouts.done()
            if entered:
                self.in_flight -= 1
                self._of_key[exchange.holder] -= 1
                if not self._of_key[exchange.holder]:
                    del self._of_key[exchange.holder]

    def _admit(self, exchange: Exchange) -> None:
        """Authenticate a client, and refuse a request without a key or beyond the limits."""
        limits = self._limits
        target = len(exchange.scope["raw_path"]) + len(exchange.scope["query_string"])
        if exchange.head.size + target > limits.header_bytes:
            message = f"the headers have {limits.header_bytes:,} bytes at most"
            raise ErrorReply(431, message, "headers_too_large")
        if self._keys.clients:
            given = exchange.head.authorization
            holder = self._keys.who(given.decode("latin-1") if given is not None else None, "ask")
            if holder is None:
                raise ErrorReply(401, f"no such key: {_ALLOWED_BY_KEY}", "invalid_api_key")
            exchange.holder = holder.name
            if self._of_key[exchange.holder] >= limits.in_flight_per_key:
                raise _too_many(
                    f"{limits.in_flight_per_key} requests of this key are being answered: wait "
                    "for one of them"
                )
        if self.in_flight >= limits.in_flight:
            raise _too_many(
                f"{limits.in_flight} requests are being answered, and no more are taken: try again"
            )
        length = exchange.head.length
        if length is not None and length.isdigit() and int(length) > limits.body_bytes:
            message = f"a body has {limits.body_bytes:,} bytes at most: send less"
            raise ErrorReply(413, message, "too_large")

    async def _send_error(self, exchange: Exchange, error: ErrorReply) -> None:
        with self.gateway.observers.counters:
            self.gateway.counts.answered("none", f"{error.status // 100}xx")
        if exchange.begun:
            exchange.cut()
        else:
            await send_error(exchange.send, error, tuple(exchange.more))

    async def _cancelled(self, exchange: Exchange) -> None:
        """Handle a timeout, a disconnected client, or the shutdown of the server."""
        why = exchange.timeouts.why
        if why == "gone":
            return
        exchange.timeouts.again()
        if why == "" and exchange.begun:
            await exchange.give_up(_ENDING)
        elif exchange.begun:
            exchange.cut()
        elif why == "":
            await self._send_error(exchange, _ENDING)
        elif why == "body":
            message = f"the body did not come within {self._limits.body_s:g} s"
            await self._send_error(exchange, ErrorReply(408, message, "slow"))
        else:
            error = ErrorReply(504, "there was no answer in time", "timeout")
            await self._send_error(exchange, error)


def _too_many(message: str) -> ErrorReply:
    return ErrorReply(429, message, "too_many_requests", retry_s=1)


# Requests other than completions, which go to the pool of routing.without_snapshot.
#
# Streamed in both directions, byte for byte; not parsed, sampled or mirrored.


class PassthroughHandler:
    """Handles the allowed paths under /v1, except completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def list_models(self, exchange: Exchange) -> None:
        """The models of the first pool that responds."""
        await exchange.body()
        exchange.timeouts.listen(exchange.receive)
        gateway = self._gateway
        first = gateway.config.without
        for pool in sorted(gateway.config.pools, key=lambda pool: pool != first):
            server = gateway.pools[pool].one()
            if server is None:
                continue
            try:
                await self._forward_from(server, exchange, None, [])
                return
            except UpstreamError as error:
                self._count_failure(server, exchange, error)
                if exchange.begun:
                    exchange.cut()
                    return
        raise ErrorReply(503, "no pool answers; try again", "no_pool", retry_s=1)

    async def handle(self, exchange: Exchange) -> None:
        gateway, head = self._gateway, exchange.head
        server = gateway.enter(gateway.config.without, exchange.client)
        more: list[tuple[str, str]] = []
        if head.length is None and not head.chunked:
            await exchange.body()
            exchange.timeouts.listen(exchange.receive)
            body = None
        else:
            if head.length is not None:
                more.append(("content-length", head.length.decode("latin-1")))
            body = self._streamed_body(exchange)
        tried: list[PoolServer] = []
        while True:
            tried.append(server)
            try:
                await self._forward_from(server, exchange, body, more)
                return
            except UpstreamError as error:
                if exchange.at_fault is not None:
                    server.breaker.abandoned()
                    raise exchange.at_fault from None
                self._count_failure(server, exchange, error)
                # without a connection nothing of the body was read
                pool = gateway.pools[server.pool]
                another = pool.enter(exchange.client, "", tried) if error.why == "connect" else None
                if another is not None:
                    server = another
                    continue
            message = f"{server.pool} gave no reply; try again"
            reply = ErrorReply(502, message, "no_upstream", retry_s=1)
            if not exchange.begun:
                raise reply
            await exchange.give_up(reply)
            return

    def _count_failure(self, server: PoolServer, exchange: Exchange, error: UpstreamError) -> None:
        self._gateway.record_failure(server, error.why, exchange.client)
        self._gateway.count_reply(server, error.why)

    async def _forward_from(
        self,
        server: PoolServer,
        exchange: Exchange,
        body: AsyncIterator[bytes] | None,
        more: list[tuple[str, str]],
    ) -> None:
        gateway, timeouts, scope = self._gateway, exchange.timeouts, exchange.scope
        pool, key = server.pool, server.about.key
        headers = named.upstream_headers(exchange.headers, key, keeps=not exchange.holder) + more
        if body is None:
            timeouts.wait_for("reply", server.about.first_byte_s)
        with gateway.observers.counters:
            gateway.counts.begun(pool)
        server.in_flight += 1
        try:
            path = exchange.with_query(scope["raw_path"].decode("latin-1"))
            response = await server.send(scope["method"], path, headers, body)
            with closing(response):
                if 300 <= response.status < 400 and response.status != 304:
                    message = f"{pool} answers with a redirect: correct its url"
                    raise ErrorReply(502, message, "redirect")
                if response.status in BROKEN:  # perhaps only at this path
                    server.breaker.abandoned()
                else:
                    server.breaker.succeeded(exchange.client)
                returned = named.client_headers(response.raw_headers)
                await forward(exchange, response, returned, server.about)
            gateway.count_reply(server, f"{response.status // 100}xx")
        except asyncio.CancelledError:
            server.breaker.abandoned()
            gateway.count_reply(server, "gone" if timeouts.why == "gone" else "timeout")
            raise
        finally:
            with gateway.observers.counters:
                gateway.counts.ended(pool)
            server.in_flight -= 1

    async def _streamed_body(self, exchange: Exchange) -> AsyncIterator[bytes]:
        most, size = exchange.limits.body_bytes, 0
        while True:
            exchange.timeouts.wait_for("body", exchange.limits.body_s)
            message = await exchange.receive()
            data = message.get("body", b"")
            size += len(data)
            if message["type"] == "http.disconnect":
                exchange.at_fault = ClientGone()
            elif size > most:
                text = f"a body has {most:,} bytes at most: send less"
                exchange.at_fault = ErrorReply(413, text, "too_large")
            if exchange.at_fault is not None:
                raise exchange.at_fault  # the upstream's connection is closed
            if data:
                yield data
            if not message.get("more_body"):
                break
        server = self._gateway.config.pools[self._gateway.config.without]
        exchange.timeouts.wait_for("reply", server.first_byte_s)
        exchange.timeouts.listen(exchange.receive)


# Readiness: whether a load balancer should send new requests, with the reasons if not.


class Readiness(msgspec.Struct):
    """A response to GET /readyz.

    Args:
        ready: whether a request would be served now.
        reasons: why not; notes: problems that do not prevent responses.
    """

    ready: bool
    reasons: list[str]
    notes: list[str]


def readiness(gateway: Gateway, *, draining: bool) -> Readiness:
    """The current readiness; draining: whether the gateway is shutting down."""
    reasons = ["the gateway is shutting down: send new requests elsewhere"] if draining else []
    snapshot, without = gateway.snapshot, gateway.config.without
    broken = [name for name, pool in gateway.pools.items() if pool.state == "open"]
    if len(broken) == len(gateway.pools):
        reasons.append(f"no pool is available: {_waits(gateway, *gateway.pools)}")
    elif snapshot is None and without in broken and not gateway.has_fallback(without):
        reasons.append(f"no route is known, and {without} serves then: {_waits(gateway, without)}")
    notes = []
    if snapshot is None:
        notes.append(f"no route is known yet: {without} serves (routing.without_snapshot)")
    elif gateway.now() >= snapshot.valid_until:
        notes.append(
            f"the routes have expired: {snapshot.without} serves where they acted "
            "(routing.without_snapshot)"
        )
    if broken and not reasons:
        notes.append(_waits(gateway, *broken))
    notes += [
        f"{name} does not use {server.url}: {why}"
        for name, pool in gateway.pools.items()
        for server in pool.servers
        if pool.checked and (why := problem_of(server))
    ]
    return Readiness(not reasons, reasons, notes)


def _waits(gateway: Gateway, *pools: str) -> str:
    """Why pools have no server for a request."""
    empty = [pool for pool in pools if not gateway.pools[pool].usable]
    waits = [f"{pool} for {gateway.pools[pool].wait_s} s" for pool in pools if pool not in empty]
    parts = [f"no replica of {' and '.join(empty)} can be used"] if empty else []
    if waits:
        parts.append(f"after failures the circuit breaker is open for {' and '.join(waits)}")
    return "; ".join(parts)
