# Decisions: pins and routes, the ledger that keeps them, and the contract that they follow.

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.gateway.chaos.asking import (
    SLICES,
    followed,
    led,
    settled,
    standing_pins,
    unpinned,
    until,
)
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment
from benchmarks.gateway.running import ROOT
from benchmarks.gateway.settled import WHOLE
from servanda.promotion.ledger.open import open_ledger

_ACTS = 60
_TEXTS = 20
_PAUSE_S = 0.05


def _acts(d: Deployment, story: str, most: int) -> Iterator[tuple[str, str, str]]:
    """Pin and unpin slices in turn, each again until it is acknowledged: reason, slice, place."""
    for n in range(most):
        name, to = SLICES[n % len(SLICES)], ("stable", "infer", "")[n // len(SLICES) % 3]
        reason = f"{story} {n}"
        d.until(lambda n=name, t=to, r=reason: _acted(d, n, t, r), f"{reason}: not acknowledged")
        yield reason, name, to


def _acted(d: Deployment, name: str, to: str, reason: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        if to:
            d.pin(name, to, reason)
        else:
            d.unpin(name, reason)
        return True
    return False


def _pins(d: Deployment) -> dict[str, str]:
    """Slice -> where it is pinned to, "" where it is not."""
    return {one: (d.slice(one)["pin"] or {"to": ""})["to"] for one in SLICES}


async def _told(d: Deployment, found: Finding, acts: list[tuple[str, str, str]]) -> None:
    """Every act is in force or superseded, the ledger has each, and it can be verified."""
    found.check(_pins(d) == {name: to for _, name, to in acts}, f"pins are {_pins(d)}")
    await until(d, lambda: not (d.status() or {"ledger_behind": 1})["ledger_behind"], "untold")
    with open_ledger(str(d.ledger), reading=True) as ledger:
        reasons = [entry.body.get("reason") for entry in ledger.entries()]
    lost = [reason for reason, *_ in acts if reason not in reasons]
    found.lost += len(lost)
    found.check(not lost, f"the ledger lacks {len(lost)} of {len(acts)}: {lost[:3]}")
    command = [
        sys.executable,
        "-m",
        "servanda",
        "promotion",
        "ledger",
        "verify",
        "--ledger",
        str(d.ledger),
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found.check(said.returncode == 0, f"ledger verify: {said.stdout[-300:]}{said.stderr[-300:]}")
    found.notes.append(f"{len(acts)} were acknowledged, the ledger has them, and verifies")


@scenario("60 pins and unpins, and the leader was killed in the middle of them")
async def pins_and_kill(d: Deployment, found: Finding) -> None:
    acts: list[tuple[str, str, str]] = []

    def act() -> None:
        for one in _acts(d, f"burst {time.time():.0f}", _ACTS):
            acts.append(one)
            if len(acts) == _ACTS // 2 and d.leader_pid is not None:
                os.kill(d.leader_pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)

    own = await during(found, d, 10.0, (0.5, act))
    found.all_answered(own)
    await led(d)
    await _told(d, found, acts)
    await unpinned(d, SLICES)
    await well(found, d)


@scenario("the ledger was locked, then moved away, 3 s each, while slices were pinned")
async def ledger_away(d: Deployment, found: Finding) -> None:
    acts: list[tuple[str, str, str]] = []
    problems: list[str] = []
    away = d.folder / "ledger-away"
    held: list[sqlite3.Connection] = []

    def act(story: str) -> None:
        acts.extend(_acts(d, f"{story} {time.time():.0f}", 2 * len(SLICES)))

    def lock() -> None:
        other = sqlite3.connect(d.ledger, timeout=5, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        held.append(other)
        act("locked")

    def free() -> None:
        for other in held:
            other.rollback()
            other.close()

    def move() -> None:
        away.mkdir()
        for file in _files(d.ledger.parent):
            file.rename(away / file.name)
        act("away")

    def back() -> None:
        problems.append((d.status() or {})["ledger"])
        for file in _files(d.ledger.parent):  # of another ledger, that was begun meanwhile
            file.unlink()
        for file in _files(away):
            file.rename(d.ledger.parent / file.name)
        away.rmdir()

    own = await during(found, d, 9.0, (1.0, lock), (4.0, free), (5.0, move), (8.0, back))
    found.all_answered(own)
    found.check(any(problems), "the leader did not say that it has no ledger")
    await _told(d, found, acts)
    await unpinned(d, SLICES)
    await well(found, d)


def _files(folder: Path) -> list[Path]:
    """Of the ledger, with its journal and its witness."""
    return [path for path in folder.iterdir() if path.is_file() and "ledger.db" in path.name]


@scenario("the contract was written anew 20 times, and every second text was wrong")
async def contract_rewritten(d: Deployment, found: Finding) -> None:
    text, digest = d.contract.read_text(), (d.status() or {})["contract"]
    wrong = ("", text[: len(text) // 2], text.replace("routing:", "rooting:"), "- [", "\0" * 100)
    refused: list[str] = []

    def write() -> None:
        for n in range(_TEXTS):
            if n % 2:
                d.contract.write_text(wrong[n // 2 % len(wrong)])
                d.until(lambda: (d.status() or {})["reload"], f"text {n} is not refused")
                refused.append((d.status() or {})["reload"])
            else:
                d.contract.write_text(text.replace("most_diverted: 1.0", f"most_diverted: 0.{n}1"))
                d.until(lambda: _reads(d), f"text {n} is not followed")
        d.contract.write_text(text)
        d.until(lambda: _reads(d), "the contract of before is not followed")

    async with standing_pins(d):
        own = await during(found, d, 20.0, (0.5, write))
        found.all_answered(own)
        found.check((d.status() or {})["contract"] == digest, "it is another contract")
        found.notes.append(f"{len(refused)} texts were refused, each with its reason")
        await settled(d)
        await well(found, d)


def _reads(d: Deployment) -> bool:
    """Whether the text that is there now is followed."""
    status: Any = d.status()
    return not status["reload"] and status["reloaded"] > d.contract.stat().st_mtime


@scenario("a promotion was rolled back (share 0), and went on 4 s later")
async def rolled_back(d: Deployment, found: Finding) -> None:
    async def route(share: float, pool: str, seconds: float) -> None:
        began = time.monotonic()
        await asyncio.to_thread(d.route, share)
        await followed(d)
        took = time.monotonic() - began
        found.notes.append(f"share {share:g} was followed after {took:.1f} s at most")
        d.settled.say(WHOLE, pool)
        asked = (await asyncio.to_thread(d.seen, "infer"))["count"]
        own = await during(found, d, seconds)
        found.all_answered(own)
        if not share:
            more = (await asyncio.to_thread(d.seen, "infer"))["count"] - asked
            found.check(not more, f"infer was asked {more} times")
        d.settled.end(WHOLE)

    users = asyncio.create_task(during(found, d, 6.0))
    await asyncio.sleep(1.0)
    await route(0.0, "stable", 4.0)
    found.all_answered(await users)
    await route(1.0, "infer", 2.0)
    await settled(d)
    await well(found, d)
