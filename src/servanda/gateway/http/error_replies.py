# Error replies in OpenAI's format, each with a next step.

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
from starlette.types import Send

Header = tuple[bytes, bytes]
_TYPES: Mapping[int, str] = {
    **dict.fromkeys((400, 405, 413, 422, 431, 505), "invalid_request_error"),
    **dict.fromkeys((408, 504), "timeout_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "overloaded_error",
}


class ErrorReply(Exception):  # noqa: N818 - what a client is told, as a word
    """An error reply to a request.

    Args:
        code: machine-readable code; retry_s: time before a retry.
    """

    def __init__(self, status: int, message: str, code: str, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_s = status, message, code, retry_s

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def event(self) -> bytes:
        """The error as an event in a stream."""
        return b"data: " + self.body + b"\n\n"


def outside_envelope(tokens: int | None, promised: tuple[float, float] | None) -> ErrorReply:
    """The refusal of a prompt whose length the contract does not promise."""
    low, high = promised or (0, 0)
    message = f"the prompt has {tokens} tokens, and the contract promises {low:g} to {high:g}"
    return ErrorReply(422, f"{message}: send one of that length", "outside_envelope")


async def send_error(send: Send, error: ErrorReply, more: tuple[Header, ...] = ()) -> None:
    headers = [(b"content-type", b"application/json"), *more]
    if error.retry_s is not None:
        headers.append((b"retry-after", str(error.retry_s).encode()))
    if error.status in (408, 413, 431):
        headers.append((b"connection", b"close"))  # the rest of the request is not read
    await send_whole(send, error.status, headers, error.body)


async def send_whole(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    headers.append((b"content-length", str(len(body)).encode()))
    start: MutableMapping[str, Any] = {"type": "http.response.start"}
    await send({**start, "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
