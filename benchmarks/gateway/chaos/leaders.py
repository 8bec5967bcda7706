# A leader whose engine dies, that dies itself, and whose store cannot be written.

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway.chaos.asking import led, scoring, settled, stores
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment

_HOUR_S, _DAY_S = 3600.0, 86_400.0


@scenario("the engine that scores was killed")
async def scorer_dead(d: Deployment, found: Finding) -> None:
    pid = d.worker_pid
    found.check(pid is not None, "no process of an engine was found")
    before = scoring(d)
    own = await during(
        found, d, 4.0, (1.0, lambda: pid is not None and os.kill(pid, signal.SIGKILL))
    )
    found.all_answered(own)
    await settled(d)
    after = scoring(d)
    found.check(after["restarts"] > before["restarts"], "it was not begun again")
    found.check(d.worker_pid not in (None, pid), "no other engine is there")
    scored, missing = (after[name] - before[name] for name in ("scored", "missing"))
    found.check(scored + missing >= own.sent, f"{own.sent - scored - missing} rows are nowhere")
    found.notes.append(f"of {own.sent} rows {scored} were scored all the same, {missing} missing")


@scenario("the leader was killed, and started again by its gateway")
async def leader_dead(d: Deployment, found: Finding) -> None:
    pid = d.leader_pid
    own = await during(
        found, d, 5.0, (1.5, lambda: pid is not None and os.kill(pid, signal.SIGKILL))
    )
    found.all_answered(own)
    await led(d)
    found.check(d.leader_pid != pid, "it is the same process")
    await settled(d)
    await well(found, d)


@scenario("the store was locked by another process for 3 s")
async def store_locked(d: Deployment, found: Finding) -> None:
    held: list[sqlite3.Connection] = []

    def lock() -> None:
        for file in stores(d):
            other = sqlite3.connect(file, timeout=5, check_same_thread=False)
            other.execute("BEGIN EXCLUSIVE")
            held.append(other)

    def free() -> None:
        for other in held:
            other.rollback()
            other.close()

    rows = d.durable()
    own = await during(found, d, 5.0, (1.0, lock), (4.0, free))
    found.check(bool(held), "no store was found")
    found.all_answered(own)
    await settled(d)
    kept(d, found, rows, own.sent)


@scenario("the file of the store was removed")
async def store_removed(d: Deployment, found: Finding) -> None:
    def remove() -> None:
        for file in d.state.glob("leader.db*"):
            file.unlink()

    rows = d.durable()
    own = await during(found, d, 4.0, (1.0, remove))
    found.all_answered(own)
    await led(d)
    await settled(d)
    kept(d, found, rows, own.sent)


@scenario("the folder of the state was moved away for 3 s")
async def store_gone(d: Deployment, found: Finding) -> None:
    away = d.folder / "away"
    own = await during(
        found,
        d,
        5.0,
        (1.0, lambda: d.state.rename(away)),
        (4.0, lambda: _back(away, d.state)),
    )
    found.all_answered(own)
    await led(d)
    await settled(d)


def _back(away: Path, state: Path) -> None:
    if state.exists():  # a new one was begun
        state.rename(state.with_name(f"begun-{time.monotonic_ns()}"))
    away.rename(state)


@scenario("the leader could write no byte for 3 s, as where a disk is full")
async def disk_full(d: Deployment, found: Finding) -> None:
    pid, problems = d.leader_pid, list[str]()
    assert pid is not None
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)

    def full() -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    def said() -> None:
        problems.append((d.status() or {}).get("store", ""))

    def free() -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    rows = d.durable()
    own = await during(found, d, 5.0, (1.0, full), (3.5, said), (4.0, free))
    found.all_answered(own)
    found.check(any(problems), "the leader did not say that nothing is kept")
    await settled(d)
    kept(d, found, rows, own.sent)


def kept(d: Deployment, found: Finding, before: int, sent: int) -> None:
    """Every request was sampled, so that every one is a row that became durable."""
    rows = d.durable() - before
    found.check(rows >= sent, f"{sent - rows} of {sent} rows are not durable")
    found.notes.append(f"{rows} rows of it are durable")


@scenario("rows came with clocks an hour and a day ahead, and as much behind")
async def clock_skew(d: Deployment, found: Finding) -> None:
    now, version = time.time(), (d.status() or {}).get("version", 0)
    for off in (_HOUR_S, -_HOUR_S, _DAY_S, -_DAY_S):
        rows = [_row(n, now + off) for n in range(20)]
        name = f"off by {off:+.0f} s"
        message = {"gateway": name, "start": now + off, "version": version, "first": 0}
        reply = d.ask("POST", "/v1/follow", "gateway", json={**message, "rows": rows, "counts": {}})
        found.check(reply.status_code == 200, f"{name}: {reply.status_code} {reply.text[:200]}")
        said = next(g["skew_s"] for g in (d.status() or {})["gateways"] if g["name"] == name)
        found.notes.append(f"{off:+.0f} s is shown as {said:+.0f} s")
    own = await during(found, d, 3.0)
    found.all_answered(own)
    found.check((d.status() or {})["valid_until"] > time.time(), "routes ended")
    await settled(d)
    await well(found, d)


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
