# The policy of every HTTP client: which URLs are taken, what is tried again and how long after,
# and how much of a body is read.
#
# The clients are two libraries: httpx2, and aiohttp on the gateway's hot path.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, urlsplit

UNAVAILABLE = (429, 502, 503, 504)  # the server did not work on the request: it may do so later


@dataclass(frozen=True)
class RetryPolicy:
    """Which requests are sent again, how often, and how long after.

    Args:
        statuses: those that are tried again; every other status is an answer.
        tries: of one request, the first included.
        pause_s: before the second try; doubled before each further one.
        most_pause_s: the longest pause, whatever Retry-After asks for.
    """

    statuses: tuple[int, ...] = UNAVAILABLE
    # a tenth of all requests may fail, and a million are answered
    tries: int = 8
    pause_s: float = 0.2
    most_pause_s: float = 60.0

    def pause(self, attempt: int, retry_after_s: float = 0.0) -> float:
        """Seconds to wait after the n-th attempt, counted from 1.

        >>> [RetryPolicy().pause(attempt) for attempt in (1, 2, 3, 10)]
        [0.2, 0.4, 0.8, 60.0]
        >>> RetryPolicy().pause(1, retry_after_s=7.0)
        7.0
        """
        return min(max(self.pause_s * 2 ** (attempt - 1), retry_after_s), self.most_pause_s)


KERNEL = RetryPolicy()
# a hook may also fail by itself, and its caller does not wait for a minute
HOOK = RetryPolicy((408, 500, *UNAVAILABLE), tries=3, pause_s=0.5, most_pause_s=10.0)


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of Retry-After; 0 where there are none.  A date counts from the response's own."""
    text = headers.get("retry-after", "").strip()
    try:
        if text.isdigit():
            return float(text)
        gap = parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("date", ""))
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, gap.total_seconds())


def http_url(url: str) -> SplitResult | None:
    """The parts of an http or https URL with a host; None for any other text.

    >>> http_url("http://127.0.0.1:8000/v1").port
    8000
    >>> http_url("http://127.0.0.1:port"), http_url("ftp://host"), http_url("https://")
    (None, None, None)
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # one that is no number raises
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname else None


def server_url(url: str) -> SplitResult | None:
    """The same of a server to whose URL paths are added: it has neither query nor fragment."""
    parts = http_url(url)
    return None if parts is None or parts.query or parts.fragment else parts


def read_body(parts: Iterable[bytes], most: int) -> bytes | None:
    """A body; None where it has more than `most` bytes, the rest of which are not read."""
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > most:
            return None
    return bytes(body)
