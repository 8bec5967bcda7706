# Clients that send too much, too slowly, or what nobody may keep.

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import aiohttp

from benchmarks.gateway.answers import WORDS
from benchmarks.gateway.chaos.asking import raw, settled
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment, user_key
from benchmarks.gateway.traffic import PATIENCE_S, Outcome, ask, request

_MARKER = "a-marker-that-nobody-may-keep"
_WARM = 36  # large prompts, after which growth counts


@scenario("prompts of 1 MB, twelve at a time")
async def large_prompts(d: Deployment, found: Finding) -> None:
    words = " ".join(WORDS[n % 7] for n in range(500_000))

    def make(number: int) -> dict[str, Any]:
        return request(number) | (
            {"prompt": words}
            if not number // 2 % 2
            else {"messages": [{"role": "user", "content": words}]}
        )

    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        own = Outcome()
        for start in range(0, 60, 12):
            if start == _WARM:  # what it takes to hold one round is no leak
                await settled(d)
                before, found.size_mib = found.size_mib, d.rss_mib()
                found.notes.append(
                    f"growth counts after {_WARM} of them, which had added "
                    f"{found.size_mib - before:.0f} MiB"
                )
            asked = [
                ask(session, d.url, make(n), user_key(n), seen=own)
                for n in range(start, start + 12)
            ]
            await asyncio.gather(*asked)
    found.probe(own)
    found.all_answered(own)
    await settled(d)


@scenario("60 clients sent a byte a second, 20 read nothing of their streams")
async def slow_clients(d: Deployment, found: Finding) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {user_key(0)}\r\n"
    slow = [_connected(d.port, head.encode()) for _ in range(30)]
    bodies = [
        _connected(d.port, f"{head}content-length: 500\r\n\r\n".encode() + b'{"pro')
        for _ in range(30)
    ]
    asked = json.dumps(request(4, stream=True)).encode()
    whole = f"{head}content-length: {len(asked)}\r\n\r\n".encode() + asked
    readers = [_connected(d.port, whole, small=True) for _ in range(20)]

    def drip() -> None:
        for one in (*slow, *bodies):
            with contextlib.suppress(OSError):
                one.send(b"x")

    acts = [(float(second), drip) for second in range(1, 5)]
    own = await during(found, d, 5.0, *acts)
    found.all_answered(own)
    found.check(own.longest_s < 5.0, "others waited")
    for one in (*slow, *bodies, *readers):
        one.close()
    await well(found, d)


def _connected(port: int, data: bytes, small: bool = False) -> socket.socket:
    found = socket.socket()
    if small:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    found.sendall(data)
    return found


@scenario("headers of 100 kB, bodies of 100 MB, ten thousand headers")
async def oversized(d: Deployment, found: Finding) -> None:
    many = {f"x-h{n}": "v" for n in range(10_000)}
    for headers in ({"x-long": "v" * 100_000}, many):
        status = await raw(d, request(0), headers)
        found.check(status in (0, 400, 413, 431), f"large headers had {status}")
    status = await raw(d, request(0, padding="x" * 100_000_000), {})
    found.check(status in (0, 400, 413), f"a large body had {status}")
    own = await during(found, d, 2.0)
    found.all_answered(own)


@scenario("a text that must not be stored, in prompts, users and sessions")
async def marked(d: Deployment, found: Finding) -> None:
    def make(number: int) -> dict[str, Any]:
        said = f"a b {_MARKER}"
        chat = {"messages": [{"role": "user", "content": said}]}
        return request(number) | (chat if number // 2 % 2 else {"prompt": said}) | {"user": _MARKER}

    own = await during(found, d, 2.0, make=make)
    found.all_answered(own)
    await settled(d)
    kept = [path for path in d.folder.rglob("*") if path.is_file()]
    found.check(any(path.name == "ledger.db" for path in kept), "no ledger was found")
    holds = [path.name for path in kept if _MARKER.encode() in path.read_bytes()]
    found.check(not holds, f"it is in {', '.join(holds)}")
