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
from servanda.gateway.proxy.pools.server_pool import PoolServer
from servanda.gateway.proxy.pools.upstreams import BROKEN, UpstreamError


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
