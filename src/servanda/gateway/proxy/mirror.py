# Mirroring: requests that stable serves are also sent to infer, and its responses are discarded.
#
# It has its own limits, and one retry, to learn how many top-k logprobs infer returns.  Fields with
# side effects and the identity of the client are removed.

from __future__ import annotations

import asyncio
from contextlib import closing

from servanda.gateway.proxy.exchange import is_packed
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.launch_log import OpenRow
from servanda.gateway.proxy.logprob_capture import LogprobCapture
from servanda.gateway.proxy.logprob_request import (
    BAD_REQUEST,
    LogprobRequest,
    allowed_best,
    logprob_request_of,
    mirrored,
)
from servanda.gateway.proxy.pools.server_pool import PoolServer
from servanda.gateway.proxy.pools.upstreams import UpstreamError, read_body
from servanda.gateway.proxy.request import RoutedRequest


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
        gateway.run_in_background(self._ask(server, routed, logprob_request, row))

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
                capture.reply(text)
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
