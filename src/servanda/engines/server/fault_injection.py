# A server that fails on purpose: faults of the transport, for tests of clients.
#
# Only in test mode.  A fault strikes a seeded share of the requests for completions.  What an
# engine gets wrong from its start is the `fault=` of its kernel; `kernel` lets it go wrong later,
# as a build does that was sound when it was described.

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.types import ASGIApp, Receive, Scope, Send

from servanda.engines.server.parse import RequestError
from servanda.theory.sampling import uniforms

Kind = Literal["hang", "drop", "status", "garble", "slow", "kernel"]
_STRUCK = ("/v1/completions", "/v1/chat/completions")


class Fault(BaseModel):
    """One fault of the transport.

    hang: no answer ever.  drop: the connection is closed without one.  status: an error.
    garble: the body is no JSON.  slow: the answer comes late.  kernel: every batch
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
                # uvicorn's `send` is a method of what holds the connection
                send.__self__.transport.abort()  # type: ignore[attr-defined]
            return await disconnected(receive)
        if fault.kind == "status":
            message = f"the server misbehaves on purpose: {fault.status}"
            error = {"message": message, "type": "Misbehaviour", "param": None}
            body = json.dumps({"error": {**error, "code": fault.status}}).encode()
            return await _reply(send, fault.status, body)
        if fault.kind == "garble":  # neither JSON nor UTF-8
            return await _reply(send, 200, b"{\xff\xfe")
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        return await self._app(scope, receive, send)


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def disconnected(receive: Receive) -> None:
    """Wait until the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
