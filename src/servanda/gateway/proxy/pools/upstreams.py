# Upstreams: HTTP clients of the pools with connection pooling.  No redirects, cookies or proxies of
# the environment; bodies are unchanged.

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from yarl import URL

from servanda.engines.tls import trusted
from servanda.gateway.proxy.config import Upstream
from servanda.gateway.proxy.pools.breaker import Breaker

COMPLETION_PATHS = frozenset(("/v1/completions", "/v1/chat/completions"))
_AT_ONCE = 1 << 18
BROKEN = (500, 502, 503, 504)  # statuses after which another pool may succeed
_SKIPPED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # only the client's headers


class UpstreamError(Exception):
    """An upstream gave no reply: `why` is connect, timeout or broken."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Server:
    """One upstream.

    Args:
        name: name of its pool; "leader" for a controller.
        clock: monotonic seconds.

    Attributes:
        in_flight: requests in flight; weight: as in `config.Replica`.
    """

    def __init__(self, name: str, about: Upstream, clock: Callable[[], float]) -> None:
        self.name, self.about, self.best = name, about, about.best
        self.breaker = Breaker(clock)
        self.in_flight, self.weight = 0, 1.0
        self._urls = {path: URL(about.base + path, encoded=True) for path in COMPLETION_PATHS}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        about = self.about
        https = about.base.startswith("https:")
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=about.keep_s,
            ttl_dns_cache=30,
            enable_cleanup_closed=False,
            ssl=(about.verify or trusted()) if https else True,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=_SKIPPED,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=about.connect_s),
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]] | Mapping[str, str],
        data: bytes | AsyncIterable[bytes] | io.BytesIO | None,
    ) -> aiohttp.ClientResponse:
        """Send a request; returns the reply once it has begun.

        Args:
            path: with its query, encoded.

        Raises:
            UpstreamError: no reply.
        """
        assert self._session is not None
        url = self._urls.get(path) or URL(self.about.base + path, encoded=True)
        # aiohttp writes bytes at once but a file in parts, between which other tasks run
        if isinstance(data, bytes) and len(data) > _AT_ONCE:
            data = io.BytesIO(data)
        try:
            response = await self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, asyncio.TimeoutError):
            raise UpstreamError("connect") from None
        except (aiohttp.ClientError, OSError):
            raise UpstreamError("broken") from None
        # other protocols and statuses above 599 are invalid
        if not 200 <= response.status < 600:
            response.close()
            raise UpstreamError("broken")
        return response

    def own_headers(self) -> dict[str, str]:
        """The headers of the gateway's own requests."""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self.about.key:
            headers["authorization"] = f"Bearer {self.about.key}"
        return headers

    async def ask(self, path: str, body: bytes, timeout_s: float, most: int) -> tuple[int, bytes]:
        """Send a small request; returns status and body.

        Raises:
            UpstreamError: no response within the time, or one of more than `most` bytes.
        """
        headers = self.own_headers()

        async def reply() -> tuple[int, bytes]:
            response = await self.send("POST", path, headers, body)
            with contextlib.closing(response):
                return response.status, await read_body(response, most)

        try:
            return await asyncio.wait_for(reply(), timeout_s)
        except asyncio.TimeoutError:
            raise UpstreamError("timeout") from None


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read a complete body.

    Raises:
        UpstreamError: it breaks off, or has more than `most` bytes.
    """
    body, whole = await read_start(response, most)
    if not whole:
        raise UpstreamError("broken")
    return body


async def read_start(response: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """A body and True; or the first bytes of a body above `most` bytes and False.

    Raises:
        UpstreamError: it breaks off.
    """
    body = bytearray()
    try:
        async for part in response.content.iter_any():
            body += part
            if len(body) > most:
                return bytes(body), False
    except (aiohttp.ClientError, OSError):
        raise UpstreamError("broken") from None
    return bytes(body), True


Response = aiohttp.ClientResponse
ClientError: Any = aiohttp.ClientError
