# Upstreams: HTTP clients of the pools with connection pooling.  No redirects, cookies or proxies of
# the environment; bodies are unchanged.
#
# A pool that fails repeatedly gets no requests for a while (circuit breaker).  A refused connection
# affects all clients.  Any other failure may be the fault of the request. Of those, each client has
# one vote, by the outcome of its latest request, so that no client can open the breaker for others
# by sending requests that fail.

from __future__ import annotations

import asyncio
import contextlib
import io
import math
from collections import OrderedDict
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import Any, Literal

import aiohttp
from yarl import URL

from servanda.engines.tls import trusted
from servanda.gateway.proxy.config import Upstream

State = Literal["closed", "open", "half-open"]
_LONGEST_S = 60.0
_CLIENTS = 1024  # clients kept


class Breaker:
    """Closed normally; open after failures; then half-open, for one trial at a time.

    It opens after `failures` failed connections in a row, or if requests of more than half of the
    recent clients failed, `failures` in a row in total.

    Args:
        clock: monotonic seconds.
        rest_s: time for which it stays open at first; doubled each time that its trials fail.
        trials: most concurrent trials while it is half-open; None: unlimited, for failures that
            only some requests can show.
        window_s: how long a client counts as recent.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        failures: int = 5,
        rest_s: float = 5.0,
        trials: int | None = 1,
        window_s: float = 30.0,
    ) -> None:
        self._clock, self._failures, self._rest_s, self._trials = clock, failures, rest_s, trials
        self._window_s = window_s
        # client -> (time of its last outcome, its failures in a row)
        self._votes: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._unreached = self._trying = 0
        self._next_s = rest_s
        self._until: float | None = None
        self._tried = 0.0
        # since the last opening: clients whose trial failed, and until when each of them waits
        self._resting: dict[str, float] = {}
        # the last two different clients and the times of their requests
        self._last = self._other = ("", -math.inf)

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    @property
    def wait_s(self) -> int:
        """Whole seconds until the next trial is allowed."""
        return 1 if self._until is None else max(1, round(self._until - self._clock()))

    def enter(self, client: str) -> bool:
        """Whether a request may pass; the caller later reports its outcome or its end."""
        now = self._clock()
        if client != self._last[0]:
            self._other = self._last
        self._last = (client, now)
        if self._until is None:
            return True
        if now < max(self._until, self._resting.get(client, self._until)):
            return False
        # a trial that takes longer than the open time does not block other trials
        busy = self._trials is not None and self._trying >= self._trials
        if busy and now < self._tried + self._next_s:
            return False
        self._tried = now
        self._trying += 1
        return True

    def succeeded(self, client: str) -> None:
        """Record the success of a request."""
        self._unreached = 0
        if self.state == "half-open":
            self._votes.clear()
            self._resting.clear()
            self._trying = 0
            self._until, self._next_s = None, self._rest_s
        self._vote(client, 0)

    def failed(self, client: str) -> None:
        """Record a failure that may be the fault of the request."""
        self._unreached = 0
        self._vote(client, self._votes.get(client, (0.0, 0))[1] + 1)
        state = self.state
        if state == "half-open":
            self._trying = max(0, self._trying - 1)
            others = [name for name in self._resting if name != client]
            if others or self._alone(client):
                self._open(2 * self._next_s)
            else:
                self._resting[client] = self._clock() + self._next_s
        elif state == "closed" and self._most_fail():
            self._open(self._next_s)

    def unreachable(self) -> None:
        """Record a refused connection."""
        self._unreached += 1
        state = self.state
        if state == "half-open":
            self._open(2 * self._next_s)
        elif state == "closed" and self._unreached >= self._failures:
            self._open(self._next_s)

    def abandoned(self) -> None:
        """Record a request that ended without information about the pool."""
        self._trying = max(0, self._trying - 1)

    def _vote(self, client: str, failures: int) -> None:
        self._votes[client] = (self._clock(), failures)
        self._votes.move_to_end(client)
        if len(self._votes) > _CLIENTS:
            self._votes.popitem(last=False)

    def _most_fail(self) -> bool:
        since = self._clock() - self._window_s
        lately = [failures for at, failures in self._votes.values() if at >= since]
        # one client's count is capped at the number that would suffice if it were the only one
        met = sum(min(failures, self._failures) for failures in lately)
        return met >= self._failures and 2 * sum(map(bool, lately)) > len(lately)

    def _alone(self, client: str) -> bool:
        """Whether there is no other recent client."""
        since = self._clock() - self._window_s - self._next_s
        return all(name == client or at < since for name, at in (self._last, self._other))

    def _open(self, rest_s: float) -> None:
        self._next_s = min(rest_s, _LONGEST_S)
        self._until, self._trying = self._clock() + self._next_s, 0
        self._resting.clear()


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
