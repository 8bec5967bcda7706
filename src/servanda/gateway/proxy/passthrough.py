# Passing: requests that are no completions, to the pool that serves where nothing is known.
#
# Streamed both ways, byte for byte; nothing of them is read, sampled or mirrored.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from servanda.gateway.http import headers as named
from servanda.gateway.http.error_replies import Refused
from servanda.gateway.proxy.exchange import Exchange, Gone, passed
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.upstreams import BROKEN, Failed, Server
from servanda.gateway.routing.model import Pool


class Passing:
    """The open paths under /v1, but those of completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def models(self, x: Exchange) -> None:
        """What a pool serves: of the first one that answers."""
        await x.body()
        x.patience.listen(x.receive)
        gateway = self._gateway
        first = gateway.config.without
        for pool in sorted(gateway.config.pools, key=lambda pool: pool != first):
            if gateway.servers[pool].breaker.state != "closed":
                continue
            try:
                await self._one(x, pool, None, [])
                return
            except Failed as failed:
                gateway.blame(gateway.servers[pool], failed.why, x.client)
                gateway.counts.answered(pool, failed.why)
                if x.begun:
                    x.cut()
                    return
        raise Refused(503, "no pool answers; try again", "no_pool", retry_s=1)

    async def __call__(self, x: Exchange) -> None:
        gateway = self._gateway
        pool = gateway.enter(gateway.config.without, x.client)
        more: list[tuple[str, str]] = []
        if x.head.length is None and not x.head.chunked:
            await x.body()
            x.patience.listen(x.receive)
            data = None
        else:
            if x.head.length is not None:
                more.append(("content-length", x.head.length.decode("latin-1")))
            data = self._streamed(x)
        try:
            await self._one(x, pool, data, more)
        except Failed as failed:
            if x.at_fault is not None:
                gateway.servers[pool].breaker.left()
                raise x.at_fault from None
            gateway.blame(gateway.servers[pool], failed.why, x.client)
            gateway.counts.answered(pool, failed.why)
            refused = Refused(502, f"{pool} gave no reply; try again", "no_upstream", retry_s=1)
            if not x.begun:
                raise refused from None
            await x.give_up(refused)

    async def _one(
        self,
        x: Exchange,
        pool: Pool,
        data: AsyncIterator[bytes] | None,
        more: list[tuple[str, str]],
    ) -> None:
        gateway = self._gateway
        server: Server = gateway.servers[pool]
        headers = [*named.sent(x.headers, server.about.key, keeps=not x.holder), *more]
        if data is None:
            x.patience.wait_for("reply", server.about.first_byte_s)
        gateway.counts.begun(pool)
        try:
            response = await server.send(x.scope["method"], _path(x), headers, data)
            try:
                if 300 <= response.status < 400 and response.status != 304:
                    raise Refused(
                        502, f"{pool} answers with a redirect: correct its url", "redirect"
                    )
                if response.status in BROKEN:  # perhaps at this path alone
                    server.breaker.left()
                else:
                    server.breaker.well(x.client)
                found = named.returned(response.raw_headers)
                await passed(x, response, found, server.about)
            finally:
                response.close()
            gateway.counts.answered(pool, f"{response.status // 100}xx")
        except asyncio.CancelledError:
            server.breaker.left()
            gateway.counts.answered(pool, "gone" if x.patience.why == "gone" else "timeout")
            raise
        finally:
            gateway.counts.ended(pool)

    async def _streamed(self, x: Exchange) -> AsyncIterator[bytes]:
        """A body as it comes."""
        most, size = self._gateway.config.limits.body_bytes, 0
        while True:
            x.patience.wait_for("body", x.limits.body_s)
            message = await x.receive()
            data = message.get("body", b"")
            size += len(data)
            if message["type"] == "http.disconnect":
                x.at_fault = Gone()
            elif size > most:
                said = f"a body has {most:,} bytes at most: send less"
                x.at_fault = Refused(413, said, "too_large")
            if x.at_fault is not None:
                raise x.at_fault  # the upstream's connection is closed
            if data:
                yield data
            if not message.get("more_body"):
                break
        server = self._gateway.config.pools[self._gateway.config.without]
        x.patience.wait_for("reply", server.first_byte_s)
        x.patience.listen(x.receive)


def _path(x: Exchange) -> str:
    path = x.scope["raw_path"].decode("latin-1")
    query = x.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path
