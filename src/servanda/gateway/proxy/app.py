# The application: its paths, authentication, and error replies to clients.
#
# Pure ASGI: streams are not wrapped.

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
from starlette.types import Receive, Scope, Send

from servanda.gateway.http.api_keys import Keys
from servanda.gateway.http.error_replies import ErrorReply, send_error, send_whole
from servanda.gateway.http.timeouts import Timeouts
from servanda.gateway.proxy.allowed_paths import AllowedPaths
from servanda.gateway.proxy.completion import CompletionHandler
from servanda.gateway.proxy.controller_sync import ControllerSync
from servanda.gateway.proxy.exchange import ClientGone, Exchange
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.passthrough import PassthroughHandler
from servanda.gateway.proxy.pools.upstreams import COMPLETION_PATHS, Server
from servanda.gateway.proxy.readiness import readiness

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
        sync.stop(syncing)
        waiting.cancel()
        await asyncio.gather(syncing, waiting, return_exceptions=True)
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
            holder = self._keys.who(given.decode("latin-1") if given is not None else None)
            if holder is None or not holder.may("ask"):
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
