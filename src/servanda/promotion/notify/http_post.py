# Posting: JSON to a hook, and trying again what was not taken.
#
# The path of a hook's URL is a secret, so messages name its host alone.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any, TypeVar

import httpx2

from servanda.contract.identity import digest_of
from servanda.engines.http_policy import HOOK, http_url, retry_after
from servanda.engines.tls import trusted
from servanda.errors import ContractError, MeasurementError

T = TypeVar("T")

_CONNECT_S, _ANSWER_S, _ALL_S = 5.0, 10.0, 20.0


class Busy(MeasurementError):  # noqa: N818 - what the other side is
    """It was not taken now, and the same again may be.

    Args:
        after_s: the pause that was asked for, seconds; 0 where none was.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


def insist(attempt: Callable[[], T], wait: Callable[[float], None]) -> T:
    """Try three times, with growing pauses, while the other side is busy.

    Args:
        wait: seconds, between two tries.

    Raises:
        Busy: the third try met it too.  What else `attempt` raises is raised at once.
    """
    for tried in range(1, HOOK.tries):
        try:
            return attempt()
        except Busy as busy:
            wait(HOOK.pause(tried, busy.after_s))
    return attempt()


class Hook:
    """A URL that takes POST requests.

    Args:
        option: that it was given by, for messages.
        all_s: the longest that one request takes, from looking up the host to the status.

    Raises:
        ContractError: it is no URL of http or https, or SERVANDA_CA_FILE is wrong.
    """

    def __init__(self, url: str, option: str, all_s: float = _ALL_S) -> None:
        parts = http_url(url)
        if parts is None:
            raise ContractError(
                f"{option} takes a URL that begins with http:// or https://",
                hint="what was given is not shown, for it may be a secret",
            )
        self.host = parts.hostname or ""
        self._url, self._all_s, self._verify = url, all_s, trusted()

    @property
    def name(self) -> str:
        """Host and a digest of the URL: the same at every call, and no secret."""
        return f"{self.host}:{digest_of(self._url)[:8]}"

    def post(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str] = MappingProxyType({}),
        signed: Callable[[bytes], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """Deliver in one request.

        Args:
            signed: further headers, of the very bytes that are sent.

        Raises:
            Busy: it was not taken now; MeasurementError: it was not taken.  The text names the
                host and no more.
        """
        try:
            status, after_s = _within(self._all_s, lambda: self._ask(body, headers, signed))
        except Empty:
            raise Busy(f"{self.host}: no answer within {self._all_s:g} s") from None
        except httpx2.HTTPError as error:
            raise Busy(f"{self.host}: {type(error).__name__}") from None
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise MeasurementError(f"{self.host}: {type(error).__name__}") from None
        if status in HOOK.statuses:
            raise Busy(f"{self.host}: status {status}", after_s)
        if 300 <= status < 400:
            raise MeasurementError(f"{self.host}: status {status}, a redirect: it is not followed")
        if not 200 <= status < 300:
            raise MeasurementError(f"{self.host}: status {status}")

    def _ask(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        signed: Callable[[bytes], Mapping[str, str]],
    ) -> tuple[int, float]:
        """The status, and the pause that it asks for."""
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = text.encode()
        # a redirect would carry what is posted somewhere else; the body of an answer is not
        # read, for one that trickles would hold up the caller for ever
        with httpx2.stream(
            "POST",
            self._url,
            content=data,
            headers={"content-type": "application/json", **headers, **signed(data)},
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
            follow_redirects=False,
            verify=self._verify,
        ) as answer:
            return answer.status_code, retry_after(answer.headers)


def _within(limit_s: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises; queue.Empty where that takes too long.

    The limits of a connection are for each read alone, and looking up a host has none.
    """
    answers: SimpleQueue[T | Exception] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    Thread(target=run, daemon=True).start()  # nobody waits for one that hangs
    found = answers.get(timeout=limit_s)
    if isinstance(found, Exception):
        raise found
    return found
