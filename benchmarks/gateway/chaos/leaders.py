# A leader whose engine dies, that dies itself, and whose store cannot be written.

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

from benchmarks.gateway.chaos.asking import (
    counted,
    full,
    kept,
    led,
    scoring,
    settled,
    standing_pins,
    stopped,
    stores,
)
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment

_KILLS = 5


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


@scenario("the leader was killed five times, as fast as it came back")
async def leader_dying(d: Deployment, found: Finding) -> None:
    async with standing_pins(d):

        def kill() -> None:
            for _ in range(_KILLS):
                d.until(lambda: d.status() is not None, "the leader is not back")
                pid = d.leader_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                d.until(lambda pid=pid: d.leader_pid not in (pid, None), "nobody starts it again")

        own = await during(found, d, 15.0, (1.0, kill))
        found.all_answered(own)
        await led(d)
        await settled(d)
        await well(found, d)


@scenario("the leader was stopped for 5 s, and went on")
async def leader_stopped(d: Deployment, found: Finding) -> None:
    async with standing_pins(d):
        rows, before, pid = d.durable(), counted(d, "sampled"), d.leader_pid
        assert pid is not None
        own = await during(found, d, 7.0, *stopped(pid, 1.0, 6.0))
        found.all_answered(own)
        await led(d)
        await settled(d)
        kept(d, found, rows, counted(d, "sampled") - before)


@scenario("the engine that scores was stopped for 4 s, and went on")
async def scorer_stopped(d: Deployment, found: Finding) -> None:
    rows, before, pid = d.durable(), scoring(d), d.worker_pid
    assert pid is not None
    own = await during(found, d, 6.0, *stopped(pid, 1.0, 5.0))
    found.all_answered(own)
    await settled(d)
    after = scoring(d)
    found.check(after["restarts"] == before["restarts"], "it was begun again")
    found.check(after["missing"] == before["missing"], "rows count as missing")
    kept(d, found, rows, own.sent)


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

    def said() -> None:
        problems.append((d.status() or {}).get("store", ""))

    rows = d.durable()
    own = await during(found, d, 5.0, *full(pid, 1.0, 4.0), (3.5, said))
    found.all_answered(own)
    found.check(any(problems), "the leader did not say that nothing is kept")
    await settled(d)
    kept(d, found, rows, own.sent)
