"""The floor: the same stack as the gateway's, and nothing but passing through.

It parses the body (for `stream`), forwards it with its headers, and streams what comes back.
`--bare` leaves Starlette out, for reference.

    python -m benchmarks.gateway.passthrough --port 9002 --upstream http://127.0.0.1:9001 [--bare]
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=60)
_HOP = frozenset((b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive"))


class _Body(msgspec.Struct):
    stream: bool = False


_read = msgspec.json.Decoder(_Body).decode


class _Client:
    """One session, made where its loop runs."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes, headers: Any) -> aiohttp.ClientResponse:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=_TIMEOUT, auto_decompress=False
            )
        kept = {k.decode("latin-1"): v.decode("latin-1") for k, v in headers if k not in _HOP}
        return await self._session.post(
            self._base + path, data=body, headers=kept, allow_redirects=False
        )


def starlette(base: str) -> Starlette:
    client = _Client(base)

    async def forward(request: Request) -> Response:
        body = await request.body()
        stream = _read(body).stream
        reply = await client.post(request.url.path, body, request.headers.raw)
        kind = reply.headers.get("content-type", "application/json")
        if not stream:
            async with reply:
                return Response(await reply.read(), reply.status, media_type=kind)

        async def parts() -> AsyncIterator[bytes]:
            async with reply:
                async for part in reply.content.iter_any():
                    yield part

        return StreamingResponse(parts(), reply.status, media_type=kind)

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, forward, methods=["POST"]) for path in paths])


def bare(base: str) -> Any:
    client = _Client(base)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        _read(body)
        async with await client.post(scope["path"], body, scope["headers"]) as reply:
            kind = reply.headers.get("content-type", "application/json").encode()
            headers = [(b"content-type", kind)]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            async for part in reply.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    uvicorn.run(
        (bare if options.bare else starlette)(options.upstream),
        port=options.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
