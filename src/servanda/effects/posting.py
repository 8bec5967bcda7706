# Posting: JSON to a hook, a few times at most.
#
# The path of a hook's URL is a secret, so messages name its host alone.

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2

from servanda.errors import ContractError, MeasurementError

TRIES = 3
PAUSE_S = 0.5  # before the second try; doubled before the third
_CONNECT_S, _ANSWER_S = 5.0, 10.0
_AGAIN = (408, 429, 500, 502, 503, 504)


class Hook:
    """A URL that takes POST requests.

    Args:
        option: that it was given by, for messages.
        wait: seconds between two tries.

    Raises:
        ContractError: it is no URL of http or https.
    """

    def __init__(self, url: str, option: str, wait: Callable[[float], None]) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port  # a port that is none raises
        except ValueError:
            parts, host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not host:
            raise ContractError(
                f"{option} takes a URL that begins with http:// or https://",
                hint="what was given is not shown, for it may be a secret",
            )
        self.host = host
        self._url, self._wait = url, wait

    def post(self, body: dict[str, Any]) -> None:
        """Deliver, or give up.

        Raises:
            MeasurementError: it was not taken; the text names the host and no more.
        """
        said = ""
        timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
        for attempt in range(TRIES):
            if attempt:
                self._wait(PAUSE_S * 2 ** (attempt - 1))
            try:
                # a redirect would carry what is posted somewhere else; the body of an answer
                # is not read, for one that trickles would hold up the watch for ever
                with httpx2.stream(
                    "POST", self._url, json=body, timeout=timeout, follow_redirects=False
                ) as answer:
                    status, taken = answer.status_code, answer.is_success
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                said = type(error).__name__
                continue
            if taken:
                return
            said = f"status {status}"
            if status not in _AGAIN:
                break
        raise MeasurementError(f"{self.host}: {said}")
