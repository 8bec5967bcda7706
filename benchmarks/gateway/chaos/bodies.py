# Replies without an end, and what pools say that is not so.

from __future__ import annotations

import asyncio
import time

from benchmarks.gateway.chaos.asking import (
    counted,
    gulp,
    kept,
    missing,
    rested,
    settled,
    until,
)
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment
from benchmarks.gateway.traffic import request

_VAST, _READ_S = 1 << 30, 300.0
_LEFT_S = 5.0
_MARKED = "what has no end"


@scenario("infer answered with a body of 1 GiB, sampled and not, with its length and without")
async def vast_bodies(d: Deployment, found: Finding) -> None:
    asked = request(0, prompt=_MARKED)
    unsampled = asked | {"n": 2}
    sizes: list[int] = []

    async def read() -> None:
        for kind in ("vast", "vaster"):
            d.behave("infer", kind, words=_MARKED, size=_VAST)
            sizes.extend([await gulp(d, one, seconds=_READ_S) for one in (asked, unsampled)])

    reading = asyncio.create_task(read())
    own = await during(found, d, 6.0)
    found.all_answered(own)
    await reading
    d.behave("infer")
    # one that is sampled and says no length may be too long to be kept, and stable answers then
    lost = [size for n, size in enumerate(sizes) if n != 2 and size < _VAST]
    found.check(not lost and sizes[2] > 0, f"clients had {sizes} bytes")
    await rested(d)
    await well(found, d)


@scenario("infer streamed good events without end, as fast as they were read; its clients left")
async def chatter(d: Deployment, found: Finding) -> None:
    before = d.seen("infer")
    d.behave("infer", "chatter", words=_MARKED)
    asked = request(0, prompt=_MARKED, stream=True)
    began = time.monotonic()
    leaving = (gulp(d, asked | more, seconds=_LEFT_S) for more in ({}, {"n": 2}))
    own, sizes = await asyncio.gather(during(found, d, _LEFT_S), asyncio.gather(*leaving))
    found.all_answered(own)
    d.behave("infer")
    found.notes.append(f"they had {', '.join(f'{size / 2**20:.0f} MiB' for size in sizes)}")
    found.notes.append(f"in {time.monotonic() - began:.0f} s")
    await until(d, lambda: not d.seen("infer")["open"], "infer still answers somebody")
    found.check(d.seen("infer")["gone"] >= before["gone"] + 2, "infer was read to an end")
    await settled(d)
    await well(found, d)


@scenario("stable said nothing at /tokenize, then 500")
async def tokenize(d: Deployment, found: Finding) -> None:
    rows, before = d.durable(), (counted(d, "prompts") or {}).get("unknown", 0)
    d.behave("stable", "hang", path="/tokenize")
    again = (3.0, lambda: d.behave("stable", "status", status=500, path="/tokenize"))
    own = await during(found, d, 5.0, again)
    found.all_answered(own)
    await settled(d)
    kept(d, found, rows, own.sent)
    unknown = counted(d, "prompts").get("unknown", 0) - before
    found.check(unknown >= own.sent, f"of {unknown} prompts it is said that nobody knows them")
    d.behave("stable")
    await until(d, lambda: not d.seen("stable")["open"], "stable is still asked")
    await well(found, d)


@scenario("infer said that it ran another prompt than it was asked")
async def swapped(d: Deployment, found: Finding) -> None:
    gone, before = missing(d), (counted(d, "prompts") or {}).get("other", 0)
    d.behave("infer", "swapped")
    own = await during(found, d, 4.0)
    d.behave("infer")
    found.all_answered(own)
    await settled(d)
    other = counted(d, "prompts")["other"] - before
    found.check(other == own.sent, f"{other} of {own.sent} were noticed")
    found.check(missing(d) > gone, "no token counts as missing")
    found.check("ran another prompt" in d.log.read_text(), "nobody was told")
    found.notes.append(f"{other} rows of {own.sent} are missing evidence")
    await well(found, d)
