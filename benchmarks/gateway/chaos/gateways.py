# Other gateways of the same leader, which say what is odd.

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2

from benchmarks.gateway.chaos.asking import SLICES, evidence, pinned, settled, unpinned
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment

_HOUR_S, _DAY_S = 3600.0, 86_400.0
_LARGEST = 2**53 - 1  # of a number that every reader of JSON knows
_VERSION = 2**40 - 1  # of a snapshot that a leader takes for one


@scenario("rows came with clocks an hour and a day ahead, and as much behind")
async def clock_skew(d: Deployment, found: Finding) -> None:
    now, version = time.time(), (d.status() or {}).get("version", 0)
    for off in (_HOUR_S, -_HOUR_S, _DAY_S, -_DAY_S):
        name = f"off by {off:+.0f} s"
        rows = [_row(n, now + off) for n in range(20)]
        reply = _said(d, gateway=name, start=now + off, version=version, rows=rows)
        found.check(reply.status_code == 200, f"{name}: {reply.status_code} {reply.text[:200]}")
        said = next(g["skew_s"] for g in (d.status() or {})["gateways"] if g["name"] == name)
        found.notes.append(f"{off:+.0f} s is shown as {said:+.0f} s")
    own = await during(found, d, 3.0)
    found.all_answered(own)
    found.check((d.status() or {})["valid_until"] > time.time(), "routes ended")
    await settled(d)
    await well(found, d)


@scenario("a gateway with a valid key sent rubbish, gaps, huge numbers and another version")
async def rogue(d: Deployment, found: Finding) -> None:
    before, taken = evidence(d), list[int]()

    def say() -> None:
        taken.extend(_said(d, **message).status_code for message in _rubbish())

    own = await during(found, d, 4.0, (0.5, say), (1.5, say), (2.5, say))
    found.all_answered(own)
    await settled(d)
    grown = evidence(d) - before
    found.check(grown == own.sent, f"evidence grew by {grown}, and {own.sent} were asked")
    found.check({*taken} <= {200, 400}, f"it had {sorted({*taken})}")
    found.notes.append(f"of {len(taken)} messages {taken.count(200)} were taken")
    await pinned(d, SLICES[:1])  # what is decided now has to reach the others
    await well(found, d)
    await unpinned(d, SLICES[:1])
    await settled(d)
    await well(found, d)


def _rubbish() -> Iterator[dict[str, Any]]:
    """What no gateway of ours says."""
    good = _row(0, time.time())
    odd = [
        *(1, "x", None, [], {}, {"index": "x"}),
        *({**good, name: value} for name in ("at", "index", "x-chance") for value in (-1e300, "x")),
        {**good, "labels": ["law"]},
        {**good, "x-prompt": "unknown", "x-slices": [{"a": 1}]},
        {**good, "x-chance": 0.0},
        {**good, "leg": {"a": {"b": []}}},
    ]
    yield {"rows": odd}
    yield {"rows": odd, "first": 10**9}
    yield {"rows": odd, "first": _LARGEST}
    yield {"rows": odd, "first": -1}
    yield {"start": 1e300}
    yield {"start": "x", "gateway": "x" * 10_000}
    yield {"rows": {"a": 1}, "counts": []}
    yield {"counts": {"launched": {"all": 1e308}, "in_flight": {"infer": -1e308}, "log": {"a": 1}}}
    for version in (-1, 10, _VERSION, _LARGEST, 10**30):
        yield {"version": version}
    # one that begins anew: what it says of its rows counts for nobody else
    yield {"gateway": "rogue again", "start": 2.0, "rows": odd, "counts": {"sampled": _LARGEST}}


def _said(d: Deployment, **message: Any) -> httpx2.Response:
    """The reply to what a gateway says to its leader."""
    known = {"gateway": "rogue", "start": 1.0, "version": 0, "first": 0, "rows": [], "counts": {}}
    return d.ask("POST", "/v1/follow", "gateway", json={**known, **message})


def _row(index: int, at: float) -> dict[str, Any]:
    return {
        "index": index,
        "run": "fakes",
        "leg": "gateway",
        "at": at,
        "served": index + 1,
        "prompt_token_ids": [0, 1],
        "sampling": {"temperature": 1.0, "max_new_tokens": 16},
        "labels": {"domain": "law"},
        "key": "00",
        "token_ids": [0, 7],
        "logprobs": [-1.6094379124341003, -2.995732273553991],
        "finish": "stop",
        "x-chance": 1.0,
    }
