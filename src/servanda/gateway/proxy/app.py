# The application: which paths there are, who may ask, and how a client is told what is wrong.
#
# Pure ASGI: a stream is not wrapped by anything.

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
from starlette.types import Receive, Scope, Send

from servanda.gateway.http.api_keys import Keys
from servanda.gateway.http.error_replies import Refused, refuse, whole
from servanda.gateway.http.timeouts import Patience
from servanda.gateway.proxy.allowed_paths import Paths
from servanda.gateway.proxy.completion import Answering
from servanda.gateway.proxy.config import Config
from servanda.gateway.proxy.controller_sync import Follower
from servanda.gateway.proxy.exchange import Exchange, Gone
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.passthrough import Passing
from servanda.gateway.proxy.readiness import readiness
from servanda.gateway.proxy.upstreams import Server

ASKED = frozenset(("/v1/completions", "/v1/chat/completions"))
_ALLOWED_BY_KEY = "give a key of role client as `Authorization: Bearer KEY`"


def app(config: Config, gateway: Gateway | None = None) -> App:
    """The gateway as an ASGI application; it begins and ends with the server's lifespan.

    Args:
        gateway: that answers; by default one of this configuration.
    """
    return App(gateway or Gateway(config))


class App:
    """A gateway behind its paths.

    Attributes:
        in_flight: requests that are being answered.
        draining: whether it was told to end, and no new requests should be sent to it.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._limits = gateway.config.limits
        self._total_s = max(pool.total_s for pool in gateway.config.pools.values())
        self._keys = gateway.config.keys or Keys.of()
        self._paths = Paths(*gateway.config.allow)
        self._answer, self._pass = Answering(gateway), Passing(gateway)
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
        leader = self.gateway.config.leader
        clock = self.gateway.clock
        follower = Follower(self.gateway, Server("leader", leader, clock) if leader else None)
        following = asyncio.ensure_future(follower.run())
        meeting = asyncio.ensure_future(self.gateway.meet())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        follower.stop(following)
        meeting.cancel()
        await asyncio.gather(following, meeting, return_exceptions=True)
        await self.gateway.settle()
        await follower.close()
        await self.gateway.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/healthz":
            await whole(send, 200, [(b"content-type", b"text/plain")], b"ok\n")
            return
        if path == "/readyz":
            found = readiness(self.gateway, draining=self.draining)
            headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
            await whole(send, 200 if found.ready else 503, headers, msgspec.json.encode(found))
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        patience = Patience(self._total_s, self._loop)
        x = Exchange(scope, receive, send, patience, self._limits)
        if self.draining:
            x.more.append((b"connection", b"close"))  # its next request finds another gateway
        entered = False
        try:
            self._admit(x)
            self.in_flight += 1
            self._of_key[x.holder] += 1
            entered = True
            if path in ASKED:
                if scope["method"] != "POST":
                    raise Refused(405, f"{path} takes POST", "method")
                await self._answer(x, path)
            elif path == "/v1/models" and scope["method"] == "GET":
                await self._pass.models(x)
            else:
                self._paths.check(scope["method"], path, scope["raw_path"])
                await self._pass(x)
        except Refused as refused:
            await self._refused(x, refused)
        except Gone:
            pass
        except asyncio.CancelledError:
            await self._ended(x)
        finally:
            x.patience.done()
            if entered:
                self.in_flight -= 1
                self._of_key[x.holder] -= 1
                if not self._of_key[x.holder]:
                    del self._of_key[x.holder]

    def _admit(self, x: Exchange) -> None:
        """Who asks, and whether there is room for it.

        Raises:
            Refused: not that.
        """
        limits = self._limits
        target = len(x.scope["raw_path"]) + len(x.scope["query_string"])
        if x.head.size + target > limits.header_bytes:
            raise Refused(
                431, f"the headers have {limits.header_bytes:,} bytes at most", "headers_too_large"
            )
        if self._keys.clients:
            given = x.head.authorization
            holder = self._keys.who(given.decode("latin-1") if given is not None else None)
            if holder is None or not holder.may("ask"):
                raise Refused(401, f"no such key: {_ALLOWED_BY_KEY}", "invalid_api_key")
            x.holder = holder.name
            if self._of_key[x.holder] >= limits.in_flight_per_key:
                raise Refused(
                    429,
                    f"{limits.in_flight_per_key} requests of this key are being answered: wait "
                    "for one of them",
                    "too_many_requests",
                    retry_s=1,
                )
        if self.in_flight >= limits.in_flight:
            raise Refused(
                429,
                f"{limits.in_flight} requests are being answered, and no more are taken: try again",
                "too_many_requests",
                retry_s=1,
            )
        length = x.head.length
        if length is not None and length.isdigit() and int(length) > limits.body_bytes:
            raise Refused(
                413, f"a body has {limits.body_bytes:,} bytes at most: send less", "too_large"
            )

    async def _refused(self, x: Exchange, refused: Refused) -> None:
        self.gateway.counts.answered("none", f"{refused.status // 100}xx")
        if x.begun:
            x.cut()
        else:
            await refuse(x.send, refused, tuple(x.more))

    async def _ended(self, x: Exchange) -> None:
        """A wait that took too long, a client that has gone, or a server that ends."""
        why = x.patience.why
        if why == "gone":
            return
        x.patience.again()
        if why == "":
            refused = Refused(503, "the gateway ends; try again", "ending", retry_s=1)
            await (x.give_up(refused) if x.begun else self._refused(x, refused))
        elif x.begun:
            x.cut()
        elif why == "body":
            seconds = f"{self._limits.body_s:g} s"
            await self._refused(x, Refused(408, f"the body did not come within {seconds}", "slow"))
        else:
            await self._refused(x, Refused(504, "there was no answer in time", "timeout"))
