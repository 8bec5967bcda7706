# The HTTP client of a controller, for the command line.  No message contains the key.

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from servanda.contract.model import base_of
from servanda.engines.http_policy import read_body, server_url
from servanda.engines.tls import TRUST_HINT, distrusted, trusted
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller.status import ControllerStatus
from servanda.traces.serialization import from_plain

VARIABLE = "SERVANDA_ADMIN_KEY"
_TIMEOUT = httpx2.Timeout(15.0, connect=5.0)
_NUMBER = re.compile(r"\[Errno -?\d+\] ")
_LONGEST = 4096  # bytes that are read of a key's file
_MOST = 64 << 20  # bytes of an answer
_WHERE = (
    "give the URL of the admin listener; the default of `servanda serve` is http://127.0.0.1:8081"
)


def key_from(file: Path | None, environ: Mapping[str, str]) -> str:
    """The API key, from a file that holds nothing else or from SERVANDA_ADMIN_KEY.

    Raises:
        ContractError: there is no key.
    """
    text = environ.get(VARIABLE, "")
    if file is not None:
        try:
            with file.open("rb") as held:  # it may be a pipe from a secret store
                text = held.read(_LONGEST).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ContractError(
                f"{file} cannot be read: {why}", hint="it holds the key and nothing else"
            ) from None
    key = text.strip()
    if not key or not (key.isascii() and key.isprintable()) or len(key.split()) != 1:
        place = str(file) if file is not None else VARIABLE
        raise ContractError(
            f"{place} holds no key" if text or file else f"no key: {place} is not set",
            hint=f"set {VARIABLE}, or give --key-file with the key alone",
        )
    return key


class _Error(msgspec.Struct):
    message: str
    hint: str


class _ErrorReply(msgspec.Struct):
    error: _Error


class ControllerClient:
    """The client of a controller at a URL, with an API key.

    Args:
        transport: httpx2 transport, for tests.

    Raises:
        ContractError: not an http or https URL.
    """

    def __init__(self, url: str, key: str, transport: httpx2.BaseTransport | None = None) -> None:
        parts = server_url(url)
        if parts is None or "@" in parts.netloc:
            message = "--gateway takes a URL of http or https, without a key"
            raise ContractError(message, hint=_WHERE)
        self.url = base_of(url)  # as --infer-url, --stable-url and --leader take it
        self._headers = {"authorization": f"Bearer {key}", "accept": "application/json"}
        self._transport = transport

    def status(self) -> ControllerStatus:
        """The status of the controller.

        Raises:
            MeasurementError: it cannot be reached, refuses, or is not a controller.
        """
        try:
            return from_plain(ControllerStatus, self._request("GET", "/v1/status"))
        except EvidenceError as error:
            raise MeasurementError(
                f"{self.url}: {error.problems[0].message}",
                hint="is this a servanda leader of the same version?",
            ) from None

    def pin(self, slice_: str, to: str, ttl_s: float, reason: str) -> list[dict[str, Any]]:
        """Pin a slice; returns the transitions.

        Raises:
            ContractError: the controller refuses the request; MeasurementError: as above.
        """
        body = {"slice": slice_, "to": to, "ttl_s": ttl_s, "reason": reason}
        return self._request("POST", "/v1/admin/pin", body).get("transitions", [])

    def unpin(self, slice_: str, reason: str) -> list[dict[str, Any]]:
        """Release a pin; returns the transitions.  Raises: see `pin`."""
        body = {"slice": slice_, "reason": reason}
        return self._request("POST", "/v1/admin/unpin", body).get("transitions", [])

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        url, transport = f"{self.url}{path}", self._transport
        try:
            with httpx2.Client(transport=transport, timeout=_TIMEOUT, verify=trusted()) as client:
                request = client.build_request(method, url, json=body, headers=self._headers)
                answer = client.send(request, stream=True, follow_redirects=False)
                status, data = answer.status_code, read_body(answer.iter_bytes(), _MOST) or b""
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            raise MeasurementError(
                f"{self.url} cannot be reached: {_reason(error)}",
                hint=TRUST_HINT if distrusted(error) else _WHERE,
            ) from None
        try:
            if status == 200:
                return msgspec.json.decode(data, type=dict[str, Any])
            error = msgspec.json.decode(data, type=_ErrorReply).error
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # the gateway's listener uses OpenAI's error format
            raise MeasurementError(
                f"{self.url}: status {status}, not a servanda leader", hint=_WHERE
            ) from None
        if status == 401:
            error.hint = f"{VARIABLE} or --key-file holds a key of the leader's file of keys"
        kind = ContractError if status in (400, 404) else MeasurementError
        raise kind(f"{self.url}: {error.message}", hint=error.hint)


def _reason(error: Exception) -> str:
    """The system's reason for a failed connection."""
    message = _NUMBER.sub("", str(error).strip())
    if isinstance(error, httpx2.TimeoutException):
        return f"no answer in time ({message or type(error).__name__})"
    if "WRONG_VERSION_NUMBER" in message:
        return f"no TLS connection; is it http://? ({message})"
    return message or type(error).__name__
