"""From a slice's first bad request to its quarantine, beside what the process needs by itself.

    python -m benchmarks.gateway.delay [--runs 3] [--write]

Infer answers requests of one domain after another from another distribution, from one request
on; each is to be diverted by `servanda serve`, whose gateway, leader and prices are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from threading import Event
from typing import Any

import aiohttp
import numpy as np

from benchmarks import committed
from benchmarks.assumptions import table
from benchmarks.gateway.answers import FAIR, FAULTY, Answers
from benchmarks.gateway.deployment import LAW, Deployment, user_key
from benchmarks.gateway.run import DOCS
from benchmarks.gateway.running import machine
from benchmarks.gateway.stub import DOMAINS
from benchmarks.gateway.traffic import ask, request
from servanda.gateway.routing.evidence_price import add_request, evidence_above
from servanda.gateway.routing.state import Rules, Track, WatchedCell
from servanda.judgement.slices.rules import Cut
from servanda.runner.run import load
from servanda.theory.stats.group_ratio import GroupRatio

BEGIN, END = "<!-- delays -->", "<!-- end of delays -->"
RATE = 40.0  # requests a second of the slice
PAST, WIDTH, SIMULATED = 60, 16, 400
LIMITS = (0.05, 0.2)
_SECONDS = 60.0
_LOOK_S = 0.02
PARTS = ("sent_s", "posted_s", "scored_s", "decided_s", "followed_s")


def groups(answers: Answers) -> list[GroupRatio]:
    """Every answer that infer may give, as one prompt group of the total variation."""
    part = [max(0.0, 1 - p / q) for p, q in zip(FAIR, answers.probs, strict=True)]
    found = []
    for drawn in answers.drawn:
        ids = drawn.cut(WIDTH).ids
        total = math.fsum(part[token] for token in ids)
        one = np.array([len(ids)])
        found.append(GroupRatio(WIDTH, 1, np.array([total]), one, np.array([0])))
    return found


def growth(faulty: list[GroupRatio], limit: float) -> float:
    """Nats by a request, of the best bet."""
    return float(np.mean([one.above_growth(limit) for one in faulty], axis=0).max())


def alone(
    rules: Rules, cell: WatchedCell, faulty: list[GroupRatio], fair: list[GroupRatio]
) -> float:
    """Median requests that the process needs after a good past, on simulated streams."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(SIMULATED):
        track = Track()
        for at in rng.integers(len(fair), size=PAST):
            track = add_request(track, fair[at], cell.limit, 1.0)
        for n in count(1):
            track = add_request(track, faulty[rng.integers(len(faulty))], cell.limit, 1.0)
            if evidence_above(rules, cell, track).paid:
                found.append(n)
                break
    return statistics.median(found)


@dataclass
class Watch:
    """What the leader said of the rows it had, seen every few hundredths of a second."""

    d: Deployment
    over: Event = field(default_factory=Event)
    seen: list[tuple[float, int, int, int]] = field(default_factory=list)
    stable_at: float = math.inf

    def run(self) -> None:
        before = self.d.seen("stable")["count"]
        while not self.over.wait(_LOOK_S):
            status = self.d.status()
            if status is not None:
                own = next(one for one in status["gateways"] if one["name"] == "chaos")
                here, scored = own["taken"] + own["behind"], status["scoring"]["scored"]
                self.seen.append((time.time(), here, scored, own["taken"]))
            if self.d.seen("stable")["count"] > before:
                self.stable_at = time.time()
                return

    def first(self, column: int, number: int) -> float:
        """When so many rows were there, scored, or durable."""
        return next((one[0] for one in self.seen if one[column] >= number), self.stable_at)


@dataclass(frozen=True)
class Delay:
    """One slice that went wrong.

    Args:
        samples: scored bad requests at the decision.
        seconds: from the first bad request to the first that stable answered.
        sent_s: of it, until the request was sent that decided; then until its row was at the
            leader (posted_s), until it was scored (scored_s), until the decision (decided_s),
            and until the first request that stable was asked for (followed_s).
    """

    samples: int
    seconds: float
    sent_s: float
    posted_s: float
    scored_s: float
    decided_s: float
    followed_s: float


async def broken(d: Deployment, domain: str) -> Delay:
    """Let a slice go wrong, and see it leave infer."""
    name, numbers = f"domain={domain}", count()
    total: set[asyncio.Task[Any]] = set()
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def send(bad: bool, at: float) -> float:
            await asyncio.sleep(max(0.0, at - time.time()))
            number = next(numbers)
            more = {"stream": False, "metadata": {"domain": domain}}
            body = request(number, **more) | ({"user": LAW} if bad else {})
            total.add(asyncio.create_task(ask(session, d.url, body, user_key(number))))
            return time.time()

        began = time.time()
        for n in range(PAST):
            await send(False, began + n / RATE)
        await asyncio.gather(*total)
        await asyncio.to_thread(d.until, lambda: d.slice(name)["scored"] >= PAST, "nothing scored")
        good = d.slice(name)["scored"]
        status = d.status() or {}
        own = next(one for one in status["gateways"] if one["name"] == "chaos")
        rows, scored = own["taken"], status["scoring"]["scored"]
        watch = Watch(d)
        watching = asyncio.create_task(asyncio.to_thread(watch.run))
        began, sent = time.time(), list[float]()
        try:
            while not watching.done():
                if time.time() > began + _SECONDS:
                    raise RuntimeError(f"{name} was not diverted: {d.slice(name)}")
                sent.append(await send(True, began + len(sent) / RATE))
        finally:
            watch.over.set()
        await watching
        await asyncio.gather(*total)
    moves = [t for t in (d.status() or {})["transitions"] if t["slice"] == name]
    left = next(t for t in moves if t["after"] == "quarantined")
    n = left["n"] - good
    at = [sent[0], sent[n - 1], watch.first(1, rows + n), watch.first(2, scored + n)]
    at += [left["at"], watch.stable_at]
    parts = [max(0.0, b - a) for a, b in pairwise(at)]
    return Delay(n, at[-1] - at[0], *parts)


Rows = list[tuple[str, ...]]


def delays(runs: int) -> tuple[Rows, Rows]:
    """A table of what it takes, and one of where the seconds go."""
    fair = groups(Answers(FAIR, 0, 4, WIDTH))
    bad = groups(Answers(FAULTY, 1, 4, WIDTH))
    truth = math.fsum(max(0.0, q - p) for p, q in zip(FAIR, FAULTY, strict=True))
    whole: Rows = [
        (
            "limit",
            "truth",
            "log threshold / growth",
            "the process alone, median",
            "measured samples, median",
            "measured seconds, median",
            "the samples' own seconds",
            "cases",
        )
    ]
    parts: Rows = [
        (
            "limit",
            "until the request that decides is sent",
            "until its row is at the leader",
            "until it is scored",
            "until the decision is durable",
            "until stable is asked",
        )
    ]
    for limit in LIMITS:
        found, contract = list[Delay](), None
        for _ in range(runs):
            with (
                tempfile.TemporaryDirectory() as folder,
                Deployment(Path(folder), limit=limit, rate=2000.0) as d,
            ):
                contract = load(d.contract)
                found += [asyncio.run(broken(d, domain)) for domain in DOMAINS]
        cells = [WatchedCell("tv", Cut(f"domain={x}"), limit, diverts="slice") for x in DOMAINS]
        assert contract is not None
        rules = Rules(contract, tuple(cells))
        price = math.log(rules.policy.enter_evidence * rules.cells)
        needs = alone(rules, cells[0], bad, fair)
        samples = [one.samples for one in found]
        whole.append(
            (
                f"{limit:g}",
                f"{truth:.2f}",
                f"{price / growth(bad, limit):.1f}",
                f"{needs:.0f}",
                f"{statistics.median(samples):.0f} ({min(samples)} to {max(samples)})",
                spread([one.seconds for one in found]),
                f"{needs / RATE:.1f} s",
                str(len(samples)),
            )
        )
        parts.append(
            (f"{limit:g}", *(spread([getattr(one, part) for one in found]) for part in PARTS))
        )
    return whole, parts


def spread(values: list[float]) -> str:
    """Seconds: the median, and the range.

    >>> spread([1.0, 2.0, 4.0])
    '2.00 s (1.00 to 4.00)'
    """
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}")
    options = parser.parse_args()
    whole, parts = delays(options.runs)
    text = f"{table(whole)}\n\nWhere the seconds go:\n\n{table(parts)}\n\n"
    text += f"{RATE:.0f} requests a second of the slice, all sampled, after {PAST} good ones. "
    text += machine()
    print(text)
    if options.write:
        committed.write(DOCS, text, "python -m benchmarks.gateway.delay --write", BEGIN, END)


if __name__ == "__main__":
    main()
