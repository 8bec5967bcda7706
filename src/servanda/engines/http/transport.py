# Transport: JSON to a server and back, and what may be asked a second time.
#
# A request carries its own seed, so asking again is the same draw and not another one.
# Tried again: no connection, a connection that breaks, a status of the policy, and no answer in
# time where others were answered meanwhile.
# Not tried again: any other status, an unexpected body, and a server that does not respond to
# anyone.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from servanda.engines.http.key import Key
from servanda.engines.http.responses import Part, shortened
from servanda.engines.http_policy import KERNEL, RetryPolicy, read_body, retry_after
from servanda.engines.tls import TRUST_HINT, by_tls, distrusted, trusted
from servanda.errors import MeasurementError
from servanda.traces.json_fields import words

_MISSING = (404, 405, 501)  # of an endpoint that another kind of server has
_EVENT = "data:"
_DONE = "[DONE]"


@dataclass(frozen=True)
class Limits:
    """How long a server is waited for, how often it is asked, how much it may say.

    Args:
        connect_s, read_s: for a connection, and between two pieces of an answer.
        token_s: longer than `read_s` for each new token that is asked for.
        first_tries: to reach a server at all.
        most_bytes: of one answer.
    """

    connect_s: float = 10.0
    read_s: float = 120.0
    token_s: float = 0.25
    retry: RetryPolicy = KERNEL
    first_tries: int = 4
    most_bytes: int = 1 << 28


LIMITS = Limits()
NO_KEY = Key()


_NO_TLS = "write http:// where the server has no TLS"


class StatusError(MeasurementError):
    """A server that answered, and said no.

    Args:
        status: of HTTP; text: what it said.
    """

    def __init__(self, message: str, *, status: int, text: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.status, self.text = status, text


class _Passing(Exception):  # noqa: N818 - what may pass if it is asked again
    def __init__(self, what: str, hint: str, retry_after_s: float = 0.0) -> None:
        super().__init__(what)
        self.hint, self.retry_after_s = hint, retry_after_s


class _Unreached(_Passing):
    """No one took the connection."""


class _Silent(_Passing):
    """No answer in time."""


class Transport:
    """One server, asked from several threads; `in_flight` connections are kept open.

    Args:
        key: that it asks for.
    """

    def __init__(
        self,
        url: str,
        in_flight: int,
        limits: Limits = LIMITS,
        pause: Callable[[float], None] = time.sleep,
        key: Key = NO_KEY,
    ) -> None:
        self.url, self.limits, self._pause = url.rstrip("/"), limits, pause
        self._key = key
        self._heard = 0  # answers that began, whatever they said
        self._client = httpx2.Client(
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=in_flight),
            follow_redirects=False,
            # a proxy on the way could be another server, and a packed body one without end
            trust_env=False,
            verify=trusted(),
            headers={"accept-encoding": "identity", **key.headers},
        )

    def ask(self, endpoint: str, body: Mapping[str, Any] | None = None, tokens: int = 0) -> Part:
        """The JSON that an endpoint answers with; POST if there is a body.

        Args:
            tokens: new ones that are asked for, and waited for.

        Raises:
            StatusError: a status that is not 200.
            MeasurementError: no answer after all tries, too long a one, or not JSON.
        """
        return self._parsed(endpoint, self._answer(endpoint, body, tokens))

    def text(self, endpoint: str, body: Mapping[str, Any] | None = None) -> str | None:
        """A page of a server; None where it has none.  POST if there is a body."""
        try:
            return self._answer(endpoint, body).decode(errors="replace")
        except StatusError as refused:
            if refused.status in _MISSING:
                return None
            raise

    def maybe(self, endpoint: str, body: Mapping[str, Any] | None = None) -> Part | None:
        """The JSON object of an endpoint that only some servers have; None where it is not."""
        text = self.text(endpoint, body)
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError):
            return None  # a front page that answers every address
        return Part(value, "", self.url, endpoint) if isinstance(value, dict) else None

    def events(
        self, endpoint: str, body: Mapping[str, Any], tokens: int = 0
    ) -> Generator[Part, None, None]:
        """The events of a stream, as they come.  Asked once: a second try would not be timed.

        Raises:
            StatusError, MeasurementError: as `ask` does.
        """
        try:
            with self._response("POST", endpoint, body, tokens) as response:
                self._refuse_status(endpoint, response)
                read = 0
                for line in response.iter_lines():
                    read += len(line)
                    if read > self.limits.most_bytes:
                        raise self._too_long(endpoint)
                    data = line.removeprefix(_EVENT).strip()
                    if line.startswith(_EVENT) and data != _DONE:
                        event = self._parsed(endpoint, data)
                        if isinstance(event.value, dict) and "error" in event.value:
                            hidden = self._parsed(endpoint, self._key.hidden(data))
                            raise hidden.wrong("an error in the middle of a stream")
                        yield event
        except _Passing as passing:
            raise self._unreachable(endpoint, passing, 1) from None
        except httpx2.TransportError as error:
            raise self._unreachable(endpoint, self._passing(error, tokens), 1) from None

    def close(self) -> None:
        self._client.close()

    def _answer(self, endpoint: str, body: Mapping[str, Any] | None, tokens: int = 0) -> bytes:
        for attempt in range(1, self.limits.retry.tries + 1):
            heard = self._heard
            try:
                return self._once(endpoint, body, tokens)
            except _Passing as passing:
                if attempt >= self._tries(passing, heard):
                    raise self._unreachable(endpoint, passing, attempt) from None
                self._pause(self.limits.retry.pause(attempt, passing.retry_after_s))
        raise AssertionError("the last try answers or raises")

    def _tries(self, passing: _Passing, heard: int) -> int:
        """How often a request is made that ended so; `heard`: answers before it was."""
        if isinstance(passing, _Silent) and self._heard == heard:
            return 1  # no one was answered: it hangs
        if isinstance(passing, _Unreached) and not self._heard:
            return min(self.limits.first_tries, self.limits.retry.tries)
        return self.limits.retry.tries

    def _once(self, endpoint: str, body: Mapping[str, Any] | None, tokens: int) -> bytes:
        method = "GET" if body is None else "POST"
        try:
            with self._response(method, endpoint, body, tokens) as response:
                self._refuse_status(endpoint, response)
                return self._body(endpoint, response)
        except httpx2.TransportError as error:
            raise self._passing(error, tokens) from None

    @contextmanager
    def _response(
        self, method: str, endpoint: str, body: Mapping[str, Any] | None, tokens: int
    ) -> Iterator[httpx2.Response]:
        """An answer that began, to be read."""
        waits = httpx2.Timeout(self.patience(tokens), connect=self.limits.connect_s, pool=None)
        url = self.url + endpoint
        with self._client.stream(method, url, json=body, timeout=waits) as response:
            self._heard += 1
            yield response

    def patience(self, tokens: int) -> float:
        """Seconds of silence after which so long an answer is given up."""
        return self.limits.read_s + self.limits.token_s * tokens

    def _passing(self, error: httpx2.TransportError, tokens: int) -> _Passing:
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            if by_tls(error):
                raise MeasurementError(
                    f"{self.url} cannot be reached by TLS: {shortened(str(error))}",
                    hint=TRUST_HINT if distrusted(error) else _NO_TLS,
                ) from None
            return _Unreached("cannot be reached", "start the server, or correct its url")
        if isinstance(error, httpx2.TimeoutException):
            what = f"did not answer within {self.patience(tokens):g} s"
            return _Silent(
                what,
                "look at the server's log; where it only needs longer, write `timeout_s: 600` "
                "beside the url, or lower batch_size",
            )
        if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError):
            what = "broke the connection off"
            return _Passing(what, "look at the server's log: a server that ran out of memory dies")
        what = f"cannot be asked: {error}"
        return _Passing(what, "kernels.*.url is http://HOST:PORT or https://HOST:PORT")

    def _refuse_status(self, endpoint: str, response: httpx2.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        body = self._body(endpoint, response).decode(errors="replace")
        reason = shortened(self._key.hidden(body).strip())
        what = f"answered with status {status}" + (f": {words(reason)}" if reason else "")
        hint = "look at the server's log"
        if status in self.limits.retry.statuses:
            raise _Passing(what, hint, retry_after(response.headers))
        if status in (401, 403):
            hint = self._key.next_move
        elif 300 <= status < 400:
            to = words(self._key.hidden(response.headers.get("location", "nowhere")))
            hint = f"redirects are not followed: if {to} is the server, name it as kernels.*.url"
        elif status == 404:
            hint = "is it the right server, and the right `dialect` and `served`?"
        elif status < 500:
            hint = "the server refuses what was asked of it; its own words say why"
        message = f"{self.url}{endpoint} {what}"
        raise StatusError(message, status=status, text=reason, hint=hint)

    def _body(self, endpoint: str, response: httpx2.Response) -> bytes:
        body = read_body(response.iter_bytes(), self.limits.most_bytes)
        if body is None:
            raise self._too_long(endpoint)
        return body

    def _too_long(self, endpoint: str) -> MeasurementError:
        return MeasurementError(
            f"{self.url}{endpoint} answers with more than {self.limits.most_bytes:,} bytes",
            hint="no answer of a kernel is that long: is it the right server?",
        )

    def _parsed(self, endpoint: str, text: bytes | str) -> Part:
        return Part.parse(text, self.url, endpoint, self._key.hidden)

    def _unreachable(self, endpoint: str, passing: _Passing, tries: int) -> MeasurementError:
        times = f" ({tries} tries)" if tries > 1 else ""
        return MeasurementError(f"{self.url}{endpoint} {passing}{times}", hint=passing.hint)
