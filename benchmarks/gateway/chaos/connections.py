# Connections: clients that hang up, that send ahead, and whose requests can be read in two ways.

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gateway.chaos.asking import settled, until
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment, user_key
from benchmarks.gateway.traffic import request
from benchmarks.gateway.wire import MARK

_CLIENTS = 300
_SLACK = 16  # descriptors and connections that are kept for the next request
_AHEAD = 8
_HIDDEN = "/v1/hidden"  # of a request that nobody sends
_WAIT_S = 5.0
# what an upstream may be asked while nobody asks for anything else
_SOUND = re.compile(
    r"GET /v1/models|POST (/v1/(chat/)?completions|/v1/embeddings|/tokenize)(\?a=%0d%0a\S+)?"
)


@scenario("300 clients hung up at random moments of streams and bodies")
async def hang_ups(d: Deployment, found: Finding) -> None:
    rng = random.Random(7)
    files = _files(d)
    before = {pool: d.seen(pool)["connections"] for pool in d.pools}

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
        data = _request(request(number, prompt="a b"), f"gone{number}")
        part = rng.random() < 0.2
        writer.write(data[: rng.randrange(len(data))] if part else data)
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        if not part and rng.random() < 0.5:
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 2000)), 1.0)
        writer.transport.abort()

    async def leave() -> None:
        for start in range(0, _CLIENTS, 20):
            await asyncio.gather(*(one(start + n) for n in range(20)))
            await asyncio.sleep(0.1)

    own, _ = await asyncio.gather(during(found, d, 5.0), leave())
    found.all_answered(own)
    await settled(d)

    def free() -> bool:
        held = {pool: d.seen(pool) for pool in d.pools}
        return _files(d) <= files + _SLACK and all(
            not one["open"] and one["connections"] <= before[pool] + _SLACK
            for pool, one in held.items()
        )

    await until(d, free, "descriptors or connections did not come back")
    await well(found, d)


def _files(d: Deployment) -> int:
    """Descriptors that the gateway has open."""
    return sum(1 for _ in Path(f"/proc/{d.gateway_pid}/fd").iterdir())


def _request(body: dict[str, Any], mark: str, *more: str) -> bytes:
    """One request as it is on the wire.

    Args:
        more: header lines.
    """
    data = json.dumps({**body, "metadata": {**body.get("metadata", {}), MARK: mark}}).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"authorization: Bearer {user_key(0)}",
        f"{MARK}: {mark}",
        f"content-length: {len(data)}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def _talk(d: Deployment, data: bytes) -> bytes:
    """All that comes back, until the gateway closes or says nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
    found = b""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(data)
        while part := await asyncio.wait_for(reader.read(65_536), _WAIT_S):
            found += part
    with contextlib.suppress(OSError):
        writer.close()
    return found


@scenario("20 connections sent eight requests each before they read the first reply")
async def pipelined(d: Deployment, found: Finding) -> None:
    async def one(number: int) -> None:
        marks = [f"ahead{number}x{n}" for n in range(_AHEAD)]
        last = len(marks) - 1
        data = b"".join(
            _request(request(number + n), mark, *(["connection: close"] if n == last else []))
            for n, mark in enumerate(marks)
        )
        text = (await _talk(d, data)).decode("latin-1")
        heads = re.findall(rf"(?i)\r\n{MARK}: (\w+)", text)
        found.check(heads == marks, f"replies came as {heads}")
        ids = [*dict.fromkeys(re.findall(r'"cmpl-[a-z]+-(\w+)"', text))]
        found.check(ids == marks, f"bodies came as {ids}")
        found.misrouted += heads != marks or ids != marks

    ahead = asyncio.gather(*map(one, range(20)))
    own, _ = await asyncio.gather(during(found, d, 4.0), ahead)
    found.all_answered(own)
    await well(found, d)


@scenario("requests whose end or host can be read in two ways, with another one inside")
async def smuggled(d: Deployment, found: Finding) -> None:
    shapes = [shape for path in ("/v1/completions", "/v1/embeddings") for shape in _shapes(path)]
    before = {pool: d.seen(pool)["asked"] for pool in d.pools}
    talks = asyncio.gather(*(_talk(d, shape) for shape in shapes))
    own, told = await asyncio.gather(during(found, d, 6.0), talks)
    found.all_answered(own)
    await settled(d)
    statuses = Counter(text.split(b" ")[1].decode() if b" " in text else "0" for text in told)
    found.notes.append(", ".join(f"{n} had {status}" for status, n in sorted(statuses.items())))
    for pool in d.pools:
        new = d.seen(pool)["asked"].keys() - before[pool].keys()
        odd = [one for one in sorted(new) if not _SOUND.fullmatch(one)]
        found.check(not odd, f"{pool} was asked {odd[:3]}")
        found.misrouted += len(odd)
    await well(found, d)


def _shapes(path: str) -> list[bytes]:
    """Requests that have another one inside for whoever reads lines or lengths otherwise."""
    inner = f"GET {_HIDDEN} HTTP/1.1\r\nhost: x\r\nx-hidden: 1\r\n\r\n".encode()
    asked = json.dumps(request(0)).encode()
    size, whole = len(asked), asked + inner
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (size, asked)
    length, chunked = f"content-length: {size}", "transfer-encoding: chunked"
    key = f"authorization: Bearer {user_key(0)}"

    def one(*lines: str, body: bytes = whole, line: str = f"POST {path} HTTP/1.1") -> bytes:
        head = "\r\n".join([line, *([] if "host:" in lines[0] else ["host: x"]), key, *lines])
        return head.encode("latin-1") + b"\r\n\r\n" + body

    lengths = (f"+{size}", f"{size}, {size}", f"{size} {size}", hex(size), f"{size}\x0b", "-1", "")
    codings = ("xchunked", "chunked, identity", "identity", "chunked\x0b", "\tchunked", "CHUNKED,")
    sizes = (
        b"%x ;\n" % size,
        b"%x" % (size + 2**64),
        b"-%x" % size,
        b"0x%x" % size,
        b"%x\n" % size,
    )
    return [
        *(one(length, chunked, body=b"0\r\n\r\n" + inner) for _ in range(2)),
        one(chunked, "content-length: 4", body=chunks + inner),
        one(length, f"content-length: {size + len(inner)}"),
        one(f"content-length: {size + len(inner)}", length),
        *(one(f"content-length: {said}") for said in lengths),
        *(one(f"transfer-encoding: {said}", length, body=chunks + inner) for said in codings),
        *(one(f"transfer-encoding: {said}", body=chunks + inner) for said in codings),
        one(chunked, "transfer-encoding: identity", body=chunks + inner),
        *(one(chunked, body=chunks.replace(b"%x" % size, said, 1) + inner) for said in sizes),
        one(chunked, body=chunks[:-2] + b"content-length: 5\r\nx-hidden: 1\r\n\r\n" + inner),
        one(chunked, body=chunks[:-5].rstrip() + b"xx0\r\n\r\n" + inner),
        one(f"content-length : {size}"),
        one("transfer-encoding : chunked", length, body=chunks + inner),
        one("x-a: b\r\n content-length: 0", length),
        one("transfer-encoding:\r\n chunked", length, body=chunks + inner),
        one("x-a: b\rcontent-length: 0", length),
        one("x-a: b\0c", length),
        one("x-a: \xc4\x8d\xc4\x8ax-hidden: 1", length),
        one("x-a: b\ncontent-length: 0", length),
        one(length).replace(b"\r\n", b"\n", 5),
        one("host: x", "host: y", length),
        one("host: x\r\n\thost: y", length),
        one(length, line=f"POST http://y{path} HTTP/1.1"),
        one(chunked, line=f"POST {path} HTTP/1.0", body=chunks + inner),
        one(length, line=f"POST {path} HTTP/1.1 HTTP/1.1"),
        one(length, line=f"POST {path}\tHTTP/1.1"),
        one(length, line=f"POST {path}?a=%0d%0ax-hidden:%201 HTTP/1.1"),
        one("expect: 100-continue", length),
        one("connection: upgrade, content-length", "upgrade: h2c", length),
        one("connection: content-length, authorization", length),
    ]
