# HTTP POST of JSON to a webhook, with retries.
#
# The path of a webhook's URL is a secret, so messages contain only its host.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    """It was not accepted now; a retry may succeed.

    Args:
        after_s: the requested pause, seconds; 0 if none.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


def insist(attempt: Callable[[], T], wait: Callable[[float], None]) -> T:
    """Try three times, with growing pauses, while the receiver is busy.

    Args:
        wait: sleeps for seconds between attempts.

    Raises:
        Busy: the third attempt failed too.  Other errors of `attempt` are raised at once.
    """
    for tried in range(1, HOOK.tries):
        try:
            return attempt()
        except Busy as busy:
            wait(HOOK.pause(tried, busy.after_s))
    return attempt()


class Hook:
    """A webhook URL.

    Args:
        option: command-line option of the URL, for messages.
        all_s: timeout of one request, from the host look-up to the status.

    Raises:
        ContractError: not an http or https URL, or SERVANDA_CA_FILE is wrong.
    """

    def __init__(self, url: str, option: str, all_s: float = _ALL_S) -> None:
        parts = http_url(url)
        if parts is None:
            raise ContractError(
                f"{option} takes a URL that begins with http:// or https://",
                hint="the value is not shown, because it may be a secret",
            )
        self.host = parts.hostname or ""
        self._url, self._all_s, self._verify = url, all_s, trusted()

    @property
    def name(self) -> str:
        """The host and a digest of the URL: stable, and no secret."""
        return f"{self.host}:{digest_of(self._url)[:8]}"

    def post(
        self,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        headers: Mapping[str, str] = MappingProxyType({}),
        signed: Callable[[bytes], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """Deliver in one request.

        Args:
            signed: returns headers that sign the sent bytes.

        Raises:
            Busy: it was not accepted now; MeasurementError: it was not accepted.  The text names
                only the host.
        """
        try:
            status, after_s = _within(self._all_s, lambda: self._send(body, headers, signed))
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

    def _send(
        self,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        headers: Mapping[str, str],
        signed: Callable[[bytes], Mapping[str, str]],
    ) -> tuple[int, float]:
        """The status, and the pause that the response requests."""
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = text.encode()
        # a redirect would send the data to another place; the response body is not read, because a
        # slow one would block the caller
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
    """The result or error of `ask`; queue.Empty on a timeout.

    Connection timeouts apply to each read, and a host look-up has none.
    """
    answers: SimpleQueue[T | Exception] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    Thread(target=run, daemon=True).start()  # a hanging thread is abandoned
    answer = answers.get(timeout=limit_s)
    if isinstance(answer, Exception):
        raise answer
    return answer
