# Requests other than completions, which go to the pool of routing.without_snapshot.
#
# Streamed in both directions, byte for byte; not parsed, sampled or mirrored.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

from servanda.gateway.http import headers as named
from servanda.gateway.http.error_replies import ErrorReply
from servanda.gateway.proxy.exchange import ClientGone, Exchange, forward
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.upstreams import BROKEN, UpstreamError
from servanda.gateway.routing.model import Pool


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
            if gateway.servers[pool].breaker.state != "closed":
                continue
            try:
                await self._forward_from(pool, exchange, None, [])
                return
            except UpstreamError as error:
                self._count_failure(pool, exchange, error)
                if exchange.begun:
                    exchange.cut()
                    return
        raise ErrorReply(503, "no pool answers; try again", "no_pool", retry_s=1)

    async def handle(self, exchange: Exchange) -> None:
        gateway, head = self._gateway, exchange.head
        pool = gateway.enter(gateway.config.without, exchange.client)
        more: list[tuple[str, str]] = []
        if head.length is None and not head.chunked:
            await exchange.body()
            exchange.timeouts.listen(exchange.receive)
            body = None
        else:
            if head.length is not None:
                more.append(("content-length", head.length.decode("latin-1")))
            body = self._streamed_body(exchange)
        try:
            await self._forward_from(pool, exchange, body, more)
        except UpstreamError as error:
            if exchange.at_fault is not None:
                gateway.servers[pool].breaker.abandoned()
                raise exchange.at_fault from None
            self._count_failure(pool, exchange, error)
            message = f"{pool} gave no reply; try again"
            reply = ErrorReply(502, message, "no_upstream", retry_s=1)
            if not exchange.begun:
                raise reply from None
            await exchange.give_up(reply)

    def _count_failure(self, pool: Pool, exchange: Exchange, error: UpstreamError) -> None:
        self._gateway.record_failure(self._gateway.servers[pool], error.why, exchange.client)
        self._gateway.counts.answered(pool, error.why)

    async def _forward_from(
        self,
        pool: Pool,
        exchange: Exchange,
        body: AsyncIterator[bytes] | None,
        more: list[tuple[str, str]],
    ) -> None:
        gateway, timeouts, scope = self._gateway, exchange.timeouts, exchange.scope
        server = gateway.servers[pool]
        key = server.about.key
        headers = named.upstream_headers(exchange.headers, key, keeps=not exchange.holder) + more
        if body is None:
            timeouts.wait_for("reply", server.about.first_byte_s)
        gateway.counts.begun(pool)
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
            gateway.counts.answered(pool, f"{response.status // 100}xx")
        except asyncio.CancelledError:
            server.breaker.abandoned()
            gateway.counts.answered(pool, "gone" if timeouts.why == "gone" else "timeout")
            raise
        finally:
            gateway.counts.ended(pool)

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
