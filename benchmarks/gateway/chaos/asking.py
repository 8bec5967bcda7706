# What scenarios ask of a deployment, and what they wait for.

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway.chaos.finding import RATE, Finding
from benchmarks.gateway.deployment import NAME, Deployment, user_key
from benchmarks.gateway.traffic import PATIENCE_S, traffic

SLICES = ("domain=code", "domain=law", "domain=math", "domain=prose")
_REPORTED_S = 1.2  # a gateway reports every second


def gateways(d: Deployment) -> list[dict[str, Any]]:
    return [one for one in (d.status() or {"gateways": []})["gateways"] if one["name"] == NAME]


def counted(d: Deployment, name: str) -> Any:
    """What the gateway counts under a name since it was started."""
    return next((one["counts"].get(name) for one in gateways(d)), None)


def reflexes(d: Deployment) -> int:
    """How often the gateway met something odd, and acted on it by itself."""
    return sum((counted(d, "reflexes") or {}).values())


def scoring(d: Deployment) -> dict[str, Any]:
    return (d.status() or {})["scoring"]


def missing(d: Deployment) -> int:
    """Tokens of the slices' evidence that have no value."""
    slices = (d.status() or {"slices": []})["slices"]
    return sum(cell["missing"] for one in slices for cell in one["cells"])


def evidence(d: Deployment) -> int:
    """Requests that were scored and counted, over all slices."""
    return sum(one["scored"] for one in (d.status() or {"slices": []})["slices"])


def kept(d: Deployment, found: Finding, before: int, sent: int) -> None:
    """Every request was sampled, so that every one is a row that became durable."""
    rows = d.durable() - before
    found.check(rows >= sent, f"{sent - rows} of {sent} rows are not durable")
    found.notes.append(f"{rows} rows of it are durable")


def gaps(d: Deployment) -> list[str]:
    """What the log of sampled requests lacks, or cannot be read of it."""
    found, rows = list[str](), defaultdict[tuple[str, str], list[int]](list)
    for file in sorted(d.served.glob("*.jsonl")):
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
            try:
                row = json.loads(line)
                rows[row["run"], row["leg"]].append(row["index"])
            except ValueError:
                if line.endswith(b"\n"):  # half a line is what a killed gateway leaves
                    found.append(f"{file.name}:{number}")
    for leg, numbers in rows.items():
        if numbers != [*range(len(numbers))]:
            odd = next(n for n, number in enumerate(numbers) if n != number)
            found.append(f"{'/'.join(leg)}: {numbers[odd]} stands where {odd} should")
    return found


def moves(d: Deployment) -> int:
    """Decisions that the leader made."""
    return int((d.status() or {}).get("moves", 0))


def stores(d: Deployment) -> list[Path]:
    found = [path for path in d.state.rglob("*") if path.is_file()]
    return [path for path in found if path.read_bytes()[:15] == b"SQLite format 3"]


def stopped(pid: int, since: float, until: float) -> list[tuple[float, Callable[[], Any]]]:
    """Acts that let a process stand still from one second to another."""
    return [
        (at, lambda how=how: os.kill(pid, how))
        for at, how in ((since, signal.SIGSTOP), (until, signal.SIGCONT))
    ]


def full(pid: int, since: float, until: float) -> list[tuple[float, Callable[[], Any]]]:
    """Acts that let a process write no byte of any file from one second to another."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    return [
        (at, lambda most=most: resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard)))
        for at, most in ((since, 0), (until, hard))
    ]


async def until(d: Deployment, true: Callable[[], Any], otherwise: str) -> None:
    await asyncio.to_thread(d.until, true, otherwise)


async def settled(d: Deployment) -> None:
    """Until everything that was sampled is durable at the leader, and scored."""

    def done() -> bool:
        status = d.status()
        if status is None or status["scoring"]["queued"]:
            return False
        return all(not one["behind"] for one in status["gateways"])

    await asyncio.sleep(_REPORTED_S)
    await until(d, done, "rows still wait")


async def rested(d: Deployment, pool: str = "infer") -> None:
    """Until a pool is asked again, after the gateway's own reflexes let it rest."""

    def asked() -> bool:
        before = d.seen(pool)["count"]
        own = asyncio.run(traffic(d.url, 0.5, RATE))
        return d.seen(pool)["count"] >= before + 4 and own.answered == own.sent

    await asyncio.to_thread(d.until, asked, f"{pool} is asked no more", 45.0)


async def led(d: Deployment) -> None:
    """Until the leader answers again."""
    await until(d, lambda: d.status() is not None, "the leader is not back")


async def followed(d: Deployment) -> None:
    """Until the gateway goes by what the leader decided last."""
    version = (await asyncio.to_thread(d.status) or {}).get("version", 0)

    def heard() -> bool:
        return any(one["version"] >= version for one in gateways(d))

    await until(d, heard, "the gateway does not follow its leader")


async def pinned(d: Deployment, names: tuple[str, ...], to: str = "stable") -> None:
    for name in names:
        await asyncio.to_thread(d.pin, name, to)
    await followed(d)
    for name in names:
        d.settled.say(name, to)


async def unpinned(d: Deployment, names: tuple[str, ...]) -> None:
    for name in names:
        d.settled.end(name)
        await asyncio.to_thread(d.unpin, name)
    await followed(d)


@contextlib.asynccontextmanager
async def standing_pins(d: Deployment) -> AsyncIterator[None]:
    """One slice pinned to stable and one to infer, while something else breaks."""
    code, law, *_ = SLICES
    await pinned(d, (code,))
    await pinned(d, (law,), "infer")
    try:
        yield
    finally:
        await unpinned(d, (code, law))


async def raw(d: Deployment, body: dict[str, Any], headers: dict[str, str]) -> int:
    """The status of one request; 0 where the connection was closed instead."""
    timeout = aiohttp.ClientTimeout(total=30)
    sent = {"authorization": f"Bearer {user_key(0)}", **headers}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{d.url}/v1/completions", json=body, headers=sent) as reply,
        ):
            await reply.read()
            return reply.status
    except (aiohttp.ClientError, OSError):
        return 0


async def gulp(
    d: Deployment, body: dict[str, Any], *, most: float = float("inf"), seconds: float = PATIENCE_S
) -> int:
    """Bytes that one client had of a reply; it goes after so many, or after so long."""
    size = 0
    headers = {"authorization": f"Bearer {user_key(0)}"}
    timeout = aiohttp.ClientTimeout(total=seconds, sock_read=5)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{d.url}/v1/completions", json=body, headers=headers) as reply,
        ):
            async for part in reply.content.iter_any():
                size += len(part)
                if size > most:
                    break
    return size
