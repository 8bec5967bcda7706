"""Memory over minutes: a hundred requests a second through `servanda serve`, one in ten scored.

    python -m benchmarks.gateway.soak [--seconds 300] [--rate 100] [--write]

Exit code 1 where a request was not answered, or a sampled row is not durable at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import committed
from benchmarks.assumptions import table
from benchmarks.gateway.deployment import Deployment
from benchmarks.gateway.run import DOCS
from benchmarks.gateway.running import machine
from benchmarks.gateway.traffic import Outcome, traffic

BEGIN, END = "<!-- soak -->", "<!-- end of soak -->"
SAMPLED = 0.1
_WARM_S = 10.0  # in which every process has done everything once
_LOOKS = (0.2, 0.6, 1.0)  # of the time


@dataclass(frozen=True)
class Look:
    """How things are after some seconds of traffic; MiB of each process."""

    seconds: float
    gateway: float
    leader: float
    worker: float
    durable: int

    @property
    def row(self) -> tuple[str, ...]:
        sizes = (f"{size:.0f} MiB" for size in (self.gateway, self.leader, self.worker))
        return (f"{self.seconds / 60:.3g} min", *sizes, f"{self.durable:,}")


def look(d: Deployment, seconds: float) -> Look:
    pids = (d.gateway_pid, d.leader_pid, d.worker_pid)
    sizes = [d.rss_mib(pid) if pid is not None else 0.0 for pid in pids]
    return Look(seconds, *sizes, durable=d.durable())


async def soaked(
    d: Deployment, seconds: float, rate: float
) -> tuple[Outcome, list[Look], tuple[int, int]]:
    """What became of users, how memory went, and how many rows were sampled and are durable."""
    warm = await traffic(d.url, _WARM_S, rate)
    looks = [await asyncio.to_thread(look, d, 0.0)]
    users = asyncio.create_task(traffic(d.url, seconds, rate))
    began = time.monotonic()
    for part in _LOOKS:
        at = part * seconds
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        looks.append(await asyncio.to_thread(look, d, at))
    total = warm + await users

    def sampled() -> int:
        return (d.status() or {})["gateways"][0]["counts"]["sampled"]

    await asyncio.sleep(1.5)  # the gateway's last word
    await asyncio.to_thread(d.until, lambda: d.durable() >= sampled(), "rows are not durable")
    return total, looks, (sampled(), d.durable())


def told(total: Outcome, looks: Sequence[Look], rows: tuple[int, int]) -> str:
    head = ("after", "gateway", "leader", "scoring engine", "rows durable")
    return (
        f"{table([head, *(one.row for one in looks)])}\n\n"
        f"{total.sent:,} requests sent, {total.answered:,} answered, {total.refused} refused, "
        f"{total.broken} cut off; the longest took {total.longest_s:.1f} s. {rows[0]:,} rows "
        f"were sampled, and {rows[1]:,} are durable. {machine()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder), rate=2000.0, sample=SAMPLED, sample_near=SAMPLED, limit=0.2) as d,
    ):
        total, looks, rows = asyncio.run(soaked(d, options.seconds, options.rate))
    text = told(total, looks, rows)
    print(text)
    if options.write:
        committed.write(DOCS, text, "python -m benchmarks.gateway.soak --write", BEGIN, END)
    sys.exit(0 if total.answered == total.sent and rows[0] == rows[1] else 1)


if __name__ == "__main__":
    main()
