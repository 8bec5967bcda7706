# Upstreams that die, wait, fail, and send what is no answer.

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import aiohttp

from benchmarks.gateway.answers import FAIR, Answers, text
from benchmarks.gateway.chaos.asking import (
    SLICES,
    gulp,
    missing,
    pinned,
    reflexes,
    rested,
    settled,
    unpinned,
)
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import KEYS, Deployment, user_key
from benchmarks.gateway.running import free_port, listening, python
from benchmarks.gateway.traffic import request, traffic
from benchmarks.gateway.upstream import Upstream

_FIRST_S, _IDLE_S = 1.5, 1.0  # how long the gateway of one scenario waits for a pool
_PROMPTLY_S = 10.0  # on a busy machine
_MOST = 64 << 20
_POISON = "what no pool can answer"


@scenario("infer was killed in the middle of streams, and came back 2 s later")
async def infer_killed(d: Deployment, found: Finding) -> None:
    at: list[float] = []

    def kill() -> None:
        at.append(time.monotonic())
        os.kill(d.pools["infer"].pid, signal.SIGKILL)

    own = await during(
        found, d, 4.0, (1.0, kill), (3.0, lambda: (d.stop_pool("infer"), d.start_pool("infer")))
    )
    # what was under way may end; what begins while infer is down is answered by stable
    late = [one for one in own.spells if one.fate in ("broken", "told") and one.began > at[0]]
    found.check(not late, f"{len(late)} that began afterwards were cut off")
    found.check(not own.refused, f"{own.refused} were refused, and stable was there")
    under_way = len(own.under_way(at[0]))
    found.notes.append(f"{under_way} were under way when it was killed")
    await rested(d)
    await well(found, d)


@scenario("stable, to which two slices are pinned, answered after 3 s")
async def stable_slow(d: Deployment, found: Finding) -> None:
    await pinned(d, SLICES[:2])
    d.behave("stable", "slow", seconds=3.0)
    own = await during(found, d, 3.0)
    found.all_answered(own)
    found.check(own.longest_s < 6.0, "one took longer than stable")
    d.behave("stable")
    await unpinned(d, SLICES[:2])
    await well(found, d)


@scenario("stable, to which two slices are pinned, was down for 2 s")
async def stable_down(d: Deployment, found: Finding) -> None:
    await pinned(d, SLICES[:2])
    own = await during(
        found, d, 4.0, (1.0, lambda: d.stop_pool("stable")), (3.0, lambda: d.start_pool("stable"))
    )
    # a pin is a person's word: its slices are refused, for infer is not what was asked for
    found.check(own.answered >= own.sent / 2, "slices of infer were not answered")
    await rested(d, "stable")
    await unpinned(d, SLICES[:2])
    await well(found, d)


@scenario("both pools were down for 2 s")
async def both_down(d: Deployment, found: Finding) -> None:
    def stop() -> None:
        for pool in ("infer", "stable"):
            d.stop_pool(pool)

    def start() -> None:
        for pool in ("infer", "stable"):
            d.start_pool(pool)

    own = await during(found, d, 4.0, (1.0, stop), (3.0, start))
    known = own.statuses.keys() <= {200, 502, 503}
    found.check(known, f"statuses are {dict(own.statuses)}")
    found.check(own.refused > 0, "nobody was refused")
    found.check(own.later == own.refused, "some were refused and not told when to try again")
    found.check(own.longest_s < _PROMPTLY_S, f"one took {own.longest_s:.1f} s")
    found.notes.append(f"{own.statuses[503]} had 503, {own.statuses[502]} had 502")
    await rested(d)
    await well(found, d)


@scenario("one client sent 20 requests a second that both pools answer with 500")
async def poison(d: Deployment, found: Finding) -> None:
    for pool in d.pools:
        d.behave(pool, "status", status=500, words=_POISON)

    def bad(number: int) -> dict[str, Any]:
        return request(number, user=_POISON)

    own, worse = await asyncio.gather(
        during(found, d, 4.0), traffic(d.url, 4.0, 20.0, bad, key=KEYS["client"])
    )
    found.all_answered(own)
    found.check(worse.statuses == {500: worse.sent}, f"it had {dict(worse.statuses)}")
    held = [name for name, pool in (d.status() or {})["pools"].items() if pool["open_at"]]
    found.check(not held, f"{held} are held to be broken")
    found.notes.append(f"{worse.sent} of its requests had 500, and those of others none")
    for pool in d.pools:
        d.behave(pool)
    await well(found, d)


@scenario("infer closed the connection in the middle of one reply in five")
async def cut_off(d: Deployment, found: Finding) -> None:
    d.behave("infer", "cut", share=0.2)
    own = await during(found, d, 4.0)
    struck = d.behave("infer")["struck"]
    found.check(own.broken <= struck, f"{own.broken} were cut off, and {struck} were cut")
    found.check(not own.refused, f"{own.refused} were refused, and stable was there")
    found.check(own.told == own.broken, "a stream ended without an event that says so")
    found.notes.append(f"{struck} were cut: {own.told} streams said so, stable answered the others")
    await rested(d)
    await well(found, d)


@scenario("infer answered one request in three with 503, then one in three not at all")
async def infer_fails(d: Deployment, found: Finding) -> None:
    d.behave("infer", "status", share=0.33)
    own = await during(found, d, 4.0, (2.0, lambda: d.behave("infer", "refuse", share=0.33)))
    found.all_answered(own)
    d.behave("infer")
    await rested(d)
    await well(found, d)


@scenario("infer, then both pools, sent no byte; a gateway that waits 1.5 s")
async def hanging(d: Deployment, found: Finding) -> None:
    with ExitStack() as stack:
        url = _impatient(stack, d)
        await during(found, d, 1.0, url=url)
        d.behave("infer", "hang")
        own = await during(found, d, 2.0, url=url)
        found.all_answered(own)
        found.check(own.longest_s < _FIRST_S + 1, f"one took {own.longest_s:.1f} s")
        d.behave("stable", "hang")
        own = await during(found, d, 2.0, url=url)
        found.check(own.refused == own.sent, f"{own.sent - own.refused} were not refused")
        found.check(own.longest_s < 2 * _FIRST_S + 1, f"one took {own.longest_s:.1f} s")
        d.behave("infer")
        d.behave("stable")
        found.notes.append("infer alone: stable answered all; both: all were refused")
    await settled(d)
    await well(found, d)


@scenario("one stream in five stopped after three events; a gateway that waits 1 s")
async def stalling(d: Deployment, found: Finding) -> None:
    with ExitStack() as stack:
        url = _impatient(stack, d)
        await during(found, d, 1.0, url=url)
        d.behave("infer", "stall", share=0.2)
        own = await during(found, d, 2.0, url=url)
        struck = d.behave("infer")["struck"]
        found.check(own.broken <= struck, f"{own.broken} were cut off, and {struck} stopped")
        found.check(own.longest_s < _IDLE_S + 1.5, f"one took {own.longest_s:.1f} s")
        found.notes.append(f"{own.told} of {own.broken} clients were told in an event")
    await settled(d)
    await well(found, d)


def _impatient(stack: ExitStack, d: Deployment) -> str:
    """Another gateway of the same leader, that waits for less long than `servanda serve`."""
    port = free_port()
    urls = [part for name in d.pools for part in (f"--{name}", d.pools[name].url)]
    waits = ["--first-byte", str(_FIRST_S), "--idle", str(_IDLE_S)]
    leader = ["--leader", d.admin, "--leader-key", KEYS["gateway"]]
    command = python("proxy", "--show", "--port", str(port), *urls, *leader, *waits)
    return stack.enter_context(listening(command, port, log=d.folder / "proxy.log")).url


@scenario("infer gave NaN for logprobs, then one too few")
async def nan_logprobs(d: Deployment, found: Finding) -> None:
    before, odd = missing(d), reflexes(d)
    d.behave("infer", "nan")
    own = await during(found, d, 4.0, (2.0, lambda: d.behave("infer", "short")))
    found.all_answered(own)
    d.behave("infer", "nan")
    drawn = Answers(FAIR, 0, 4, 16).drawn
    texts = {text(one.cut(16).ids) for one in drawn}
    said = [await _text(d, n) for n in range(32)]
    changed = [one for one in said if one not in texts]
    found.check(not changed, f"{len(changed)} answers are other texts: {changed[:1]}")
    d.behave("infer")
    await settled(d)
    gone, seen = missing(d) - before, reflexes(d) - odd
    found.check(gone > 0, "no token counts as missing")
    found.check(seen > 0, "the gateway noticed nothing")
    found.notes.append(f"{gone} tokens count as missing; after {seen} such answers stable served")
    found.notes.append("texts are unchanged")
    await rested(d)
    await well(found, d)


async def _text(d: Deployment, number: int) -> str:
    """What a user reads of one answer."""
    body = request(number)
    path = "chat/completions" if "messages" in body else "completions"
    headers = {"authorization": f"Bearer {user_key(number)}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{d.url}/v1/{path}", json=body, headers=headers) as reply,
    ):
        said = await reply.text()
    parts = [said]
    if body.get("stream"):
        parts = [x[6:] for x in said.split("\n") if x.startswith("data: {")]
    choices = [json.loads(part)["choices"][0] for part in parts]
    of = [one.get("delta") or one.get("message") or {"content": one.get("text")} for one in choices]
    return "".join(one.get("content") or "" for one in of).strip()


@scenario("infer made one answer in ten unreadable after three events")
async def malformed(d: Deployment, found: Finding) -> None:
    d.behave("infer", "garble", share=0.1)
    own = await during(found, d, 5.0)
    struck = d.behave("infer")["struck"]
    bad = own.broken + own.refused
    found.check(bool(struck), "nothing was made unreadable")
    found.check(bad <= struck, f"{bad} met an error, and {struck} answers were unreadable")
    found.notes.append(
        f"{struck} were unreadable: {own.broken} clients saw it ({own.told} in an error event), "
        f"{own.refused} had an error"
    )
    await rested(d)
    await well(found, d)


@scenario("infer began a line of a stream and never ended it, four times")
async def endless(d: Deployment, found: Finding) -> None:
    d.behave("infer", "endless")
    asked = request(4, stream=True)
    sizes = await asyncio.gather(*(gulp(d, asked, most=_MOST) for _ in range(4)))
    struck = d.behave("infer")["struck"]
    found.check(struck == len(sizes), f"only {struck} lines were begun")
    found.check(max(sizes) <= 2 * _MOST, "a client was sent more than it read")
    found.notes.append(f"clients were sent {max(sizes) / 2**20:.1f} MiB at most")
    await rested(d)
    await well(found, d)


@scenario("infer sent its clients to another server (307)")
async def redirected(d: Deployment, found: Finding) -> None:
    trap = Upstream()
    server = await trap.serve()
    at = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
    d.behave("infer", "redirect", to=at)
    own = await during(found, d, 2.0)
    d.behave("infer")
    found.check(own.refused == own.sent, f"{own.sent - own.refused} were not refused")
    found.check(trap.count == 0, f"the gateway followed it {trap.count} times")
    server.close()
    await rested(d)
    await well(found, d)
