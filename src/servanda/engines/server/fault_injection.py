# A server that fails on purpose: faults of the transport, for tests of clients.
#
# Only in test mode.  A fault strikes a seeded share of the requests for completions.  What an
# engine gets wrong from its start is the `fault=` of its kernel; `kernel` lets it go wrong later,
# as a build does that was sound when it was described.

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servanda.engines.server.request import RequestError
from servanda.theory.sampling import uniforms

Kind = Literal[
    "hang", "drop", "status", "garble", "cut", "short", "slow", "other_sampling", "kernel"
]
DRAWN_BY = "servanda.drawn_by"  # in the scope of a request that is drawn otherwise than it says
_STRUCK = ("/v1/completions", "/v1/chat/completions")


class Fault(BaseModel):
    """One fault of the transport.

    hang: no answer ever.  drop: the connection is closed without one.  status: an error.
    garble: the body is no JSON.  cut: the connection is closed in mid-answer.  short: the last
    token is missing.  slow: the answer comes late.  other_sampling: tokens are drawn with
    `temperature` or `top_p`, and the declared distribution is reported.  kernel: every batch
    that begins from now on is run by the same kernel with `fault` of the catalogue in it, and
    the server's description is unchanged; with `when`, only for requests whose
    `metadata` says so, and the others run in batches of their own, by the sound kernel.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    kind: Kind
    share: float = Field(1.0, ge=0, le=1)
    seed: int = 0
    status: int = Field(503, ge=400, le=599)
    seconds: float = Field(1.0, ge=0, le=3600)
    temperature: float | None = Field(None, ge=0.01, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    fault: dict[str, Any] | None = Field(None, min_length=1, max_length=1)
    when: dict[str, str] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _of_a_kernel(self) -> Fault:
        if (self.kind == "kernel") != (self.fault is not None):
            raise ValueError("kind kernel has a fault of the catalogue, and no other kind has one")
        if self.kind == "kernel" and self.share != 1:
            raise ValueError(
                "a kernel is at fault for all requests, or for those of a `when`: leave out share"
            )
        if self.kind != "kernel" and self.when is not None:
            raise ValueError("only kind kernel has a `when`")
        return self

    @property
    def change(self) -> dict[str, float]:
        """What of the sampling is other than declared."""
        change = {"temperature": self.temperature, "top_p": self.top_p}
        return {n: v for n, v in change.items() if v is not None} or {"temperature": 0.95}


class FaultInjector:
    """What is on, and which requests it strikes."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.requests = self.struck = 0

    def read(self, body: dict[str, Any]) -> Fault:
        """A fault as it is asked for.

        Raises:
            RequestError: no such fault.
        """
        try:
            return Fault.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            message = f"{name}: {first['msg']}" if name else first["msg"]
            raise RequestError(f"{message}; kinds: {get_args(Kind)}", name or None) from None

    def begin(self, fault: Fault | None) -> None:
        """Counts requests anew, so that the same share strikes the same ones; None: it ends."""
        self.fault = fault
        self.requests = self.struck = 0

    def status(self) -> dict[str, Any]:
        on = self.fault.model_dump(exclude_none=True) if self.fault else None
        return {"fault": on, "asked": self.requests, "struck": self.struck}

    def next(self) -> Fault | None:
        """The fault of the next request, if it has one."""
        if self.fault is None:
            return None
        self.requests += 1
        if self.fault.when is not None:  # told by its body, which is not read yet
            return None
        if uniforms(self.fault.seed, "misbehave", self.requests, 1)[0] >= self.fault.share:
            return None
        self.struck += 1
        return self.fault

    def strikes(self, body: Mapping[str, Any]) -> bool:
        """Whether the metadata of a request make it one of those that `when` is for."""
        when = self.fault.when if self.fault is not None else None
        metadata = body.get("metadata")
        if when is None or not isinstance(metadata, dict):
            return False
        struck = all(metadata.get(name) == value for name, value in when.items())
        self.struck += struck
        return struck


class _Cut(Exception):  # noqa: N818 - on purpose
    pass


class FaultMiddleware:
    """An application behind a transport that fails on purpose."""

    def __init__(self, app: ASGIApp, injector: FaultInjector) -> None:
        self._app, self._injector = app, injector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["path"] in _STRUCK
        fault = self._injector.next() if generates else None
        if fault is None:
            return await self._app(scope, receive, send)
        if fault.kind in ("hang", "drop"):
            if fault.kind == "drop":
                _transport(send).abort()
            return await _left(receive)
        if fault.kind == "status":
            message = f"the server misbehaves on purpose: {fault.status}"
            error = {"message": message, "type": "Misbehaviour", "param": None}
            body = json.dumps({"error": {**error, "code": fault.status}}).encode()
            return await _reply(send, fault.status, body)
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        if fault.kind == "other_sampling":
            scope[DRAWN_BY] = fault.change
        if fault.kind in ("slow", "other_sampling", "kernel"):
            return await self._app(scope, receive, send)
        if fault.kind == "cut":
            return await self._cut(scope, receive, send)
        return await self._rewritten(scope, receive, send, fault.kind)

    async def _cut(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def half(message: Message) -> None:
            if message["type"] == "http.response.body":
                body = message.get("body", b"")
                part = {"body": body[: len(body) // 2], "more_body": True}
                await send({**message, **part})
                raise _Cut
            await send(message)

        try:
            await self._app(scope, receive, half)
        except _Cut:
            _transport(send).close()  # what was sent still leaves
            await _left(receive)

    async def _rewritten(self, scope: Scope, receive: Receive, send: Send, kind: str) -> None:
        start: MutableMapping[str, Any] = {}
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, keep)
        body, headers = b"".join(parts), dict(start["headers"])
        if kind == "garble":  # as long as before, and neither JSON nor UTF-8
            half = len(body) // 2
            body = body[:half] + b"\xff\xfe" + body[half + 2 :]
        else:
            body = _shortened(body)
        media = headers.get(b"content-type", b"application/json")
        await _reply(send, start["status"], body, media)


async def _reply(send: Send, status: int, body: bytes, media: bytes = b"application/json") -> None:
    headers = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _transport(send: Send) -> Any:
    """The connection of a request; uvicorn's `send` is a method of what holds it."""
    return send.__self__.transport  # type: ignore[attr-defined]


def _shortened(body: bytes) -> bytes:
    """A whole reply whose last token is missing; a stream that ends before its end."""
    if body.startswith(b"data: "):
        return b"".join(part + b"\n\n" for part in body.split(b"\n\n")[:-3])
    reply = json.loads(body)
    for choice in reply.get("choices", ()):
        lists = [choice.get("token_ids"), choice.get("prompt_logprobs")]
        lists += [*(choice.get("logprobs") or {}).values()]
        for values in lists:
            if values:
                values.pop()
    return json.dumps(reply).encode()
