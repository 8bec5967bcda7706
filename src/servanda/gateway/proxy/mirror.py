# Mirroring: infer is asked as well what stable answers, and nobody sees what it says.
#
# It has a budget of its own, and a second try only to learn how many likeliest tokens infer
# gives.  What could have an effect beside the answer is left out, and so is who asked.

from __future__ import annotations

import asyncio

from servanda.gateway.proxy.exchange import is_packed
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.launch_log import Row
from servanda.gateway.proxy.logprob_capture import Capture
from servanda.gateway.proxy.logprob_request import (
    NOT_TO_ITS_TASTE,
    Wish,
    allowed,
    mirrored,
    wish_of,
)
from servanda.gateway.proxy.request import Asked
from servanda.gateway.proxy.upstreams import Failed, read
from servanda.gateway.routing.model import Decision, Known

_MARK = ("x-servanda-mirror", "1")


class Mirror:
    """Requests that infer is asked for nobody."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._in_flight = 0
        self._tokens = max(1.0, gateway.config.limits.mirror_per_s)
        self._at = gateway.clock()

    def __call__(
        self, asked: Asked, path: str, decision: Decision, known: Known, key: str, client: str
    ) -> None:
        """Ask infer as well, if there is room; never fails, and is not waited for."""
        gateway = self._gateway
        server = gateway.servers["infer"]
        # what finds no room was never launched, and is no missing answer of infer's
        if not (self._room() and server.breaker.enter(client)):
            gateway.counts.mirror_dropped += 1
            return
        wish = gateway.wish(asked, mirrored=True) if decision.sampled else None
        row = gateway.launch(decision, known, key, wish)
        gateway.counts.mirrored += 1
        self._in_flight += 1
        gateway.beside(self._ask(asked, path, wish, row, client))

    def _room(self) -> bool:
        """Whether one more may be asked now: so many at a time, so many a second."""
        limits, now = self._gateway.config.limits, self._gateway.clock()
        most = max(1.0, limits.mirror_per_s)
        self._tokens = min(most, self._tokens + (now - self._at) * limits.mirror_per_s)
        self._at = now
        if self._in_flight >= limits.mirror_in_flight or self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    async def _ask(
        self, asked: Asked, path: str, wish: Wish | None, row: Row | None, client: str
    ) -> None:
        gateway = self._gateway
        server = gateway.servers["infer"]
        about = server.about
        lost, capture = "cancelled", None
        try:
            body = wish.body if wish is not None else mirrored(asked)
            if body is None:
                server.breaker.left()
                return
            status, text = await asyncio.wait_for(
                self._answer(path, body, client), min(about.first_byte_s, about.total_s)
            )
            if wish is not None and status in NOT_TO_ITS_TASTE:
                status, text, wish = await self._fewer(asked, path, wish, status, text, client)
            lost = f"status {status}"
            if status == 200 and text is None:
                lost = "packed"
            elif status == 200 and text is not None and wish is not None:
                capture = Capture(wish, gateway.config.limits.line_bytes)
                capture.reply(text)
        except asyncio.TimeoutError:
            lost = "timeout"
            gateway.blame(server, lost, client)
        except Failed as failed:
            lost = failed.why
            gateway.blame(server, lost, client)
        finally:
            self._in_flight -= 1
            if row is not None:
                if capture is None:
                    gateway.resolve(row, asked, {"lost": lost})
                else:
                    gateway.sensed(capture.odd, client)
                    told = capture.prompt, capture.prompt_tokens
                    gateway.resolve(row, asked, capture.answer(), *told)

    async def _fewer(
        self, asked: Asked, path: str, wish: Wish, status: int, text: bytes | None, client: str
    ) -> tuple[int, bytes | None, Wish]:
        """Ask once more for as few likeliest tokens as infer says that it gives."""
        server = self._gateway.servers["infer"]
        best = allowed(text or b"", server.best)
        less = wish_of(asked, server.about, best, mirrored=True) if best < server.best else None
        if less is None:
            return status, text, wish
        status, text = await asyncio.wait_for(
            self._answer(path, less.body, client),
            min(server.about.first_byte_s, server.about.total_s),
        )
        if status == 200:
            server.best = best
        return status, text, less

    async def _answer(self, path: str, body: bytes, client: str) -> tuple[int, bytes | None]:
        """Status and body; None where that is packed, though nobody asked for it."""
        gateway = self._gateway
        server, limits = gateway.servers["infer"], gateway.config.limits
        headers = [("content-type", "application/json"), ("accept-encoding", "identity"), _MARK]
        if server.about.key:
            headers.append(("authorization", f"Bearer {server.about.key}"))
        response = await server.send("POST", path, headers, body)
        try:
            text = await read(response, limits.reply_bytes)
        finally:
            response.close()
        if response.status >= 500:
            gateway.blame(server, "5xx", client)
        else:
            server.breaker.well(client)
        return response.status, None if is_packed(response) else text
