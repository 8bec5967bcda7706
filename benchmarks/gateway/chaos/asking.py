# What scenarios ask of a deployment, and what they wait for.

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway.chaos.finding import RATE
from benchmarks.gateway.deployment import Deployment, user_key
from benchmarks.gateway.traffic import traffic

SLICES = ("domain=code", "domain=law", "domain=math", "domain=prose")
_REPORTED_S = 1.2  # a gateway reports every second


def gateways(d: Deployment) -> list[dict[str, Any]]:
    return [one for one in (d.status() or {"gateways": []})["gateways"] if one["name"] == "chaos"]


def reflexes(d: Deployment) -> int:
    """How often the gateway met something odd, and acted on it by itself."""
    return sum(sum(one["counts"].get("reflexes", {}).values()) for one in gateways(d))


def scoring(d: Deployment) -> dict[str, Any]:
    return (d.status() or {})["scoring"]


def missing(d: Deployment) -> int:
    """Tokens of the slices' evidence that have no value."""
    slices = (d.status() or {"slices": []})["slices"]
    return sum(cell["missing"] for one in slices for cell in one["cells"])


def moves(d: Deployment) -> int:
    """Decisions that the leader made."""
    return int((d.status() or {}).get("moves", 0))


def stores(d: Deployment) -> list[Path]:
    found = [path for path in d.state.rglob("*") if path.is_file()]
    return [path for path in found if path.read_bytes()[:15] == b"SQLite format 3"]


async def settled(d: Deployment) -> None:
    """Until everything that was sampled is durable at the leader, and scored."""

    def done() -> bool:
        status = d.status()
        if status is None or status["scoring"]["queued"]:
            return False
        return all(not one["behind"] for one in status["gateways"])

    await asyncio.sleep(_REPORTED_S)
    await asyncio.to_thread(d.until, done, "rows still wait")


async def rested(d: Deployment, pool: str = "infer") -> None:
    """Until a pool is asked again, after the gateway's own reflexes let it rest."""

    def asked() -> bool:
        before = d.seen(pool)["count"]
        own = asyncio.run(traffic(d.url, 0.5, RATE))
        return d.seen(pool)["count"] >= before + 4 and own.answered == own.sent

    await asyncio.to_thread(d.until, asked, f"{pool} is asked no more", 45.0)


async def led(d: Deployment) -> None:
    """Until the leader answers again."""
    await asyncio.to_thread(d.until, lambda: d.status() is not None, "the leader is not back")


async def pinned(d: Deployment, names: tuple[str, ...], to: str = "stable") -> None:
    for name in names:
        await asyncio.to_thread(d.pin, name, to)
    await asyncio.sleep(_REPORTED_S)


async def unpinned(d: Deployment, names: tuple[str, ...]) -> None:
    for name in names:
        await asyncio.to_thread(d.unpin, name)
    await asyncio.sleep(_REPORTED_S)


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
