"""What becomes of users, rows and decisions when something breaks; exit code 1 if anything is lost.

`servanda serve` with a leader, two fake upstreams, forty users, everything on loopback.  Each
row breaks one thing under traffic, and puts it right again.

    python -m benchmarks.gateway.chaos [--only NAME ...] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2

from benchmarks import committed
from benchmarks.assumptions import table
from benchmarks.gateway.chaos import (
    access,
    bodies,
    clients,
    connections,
    decisions,
    gateways,
    leaders,
    pools,
    restarts,
)
from benchmarks.gateway.chaos.asking import moves, settled
from benchmarks.gateway.chaos.finding import HEAD, RATE, SCENARIOS, Finding
from benchmarks.gateway.deployment import Deployment
from benchmarks.gateway.running import ROOT, machine
from benchmarks.gateway.traffic import traffic

DOCS = ROOT / "docs" / "explanation" / "gateway_chaos.md"
# in the order of the table
KINDS = (pools, bodies, leaders, decisions, gateways, restarts, clients, connections, access)
GROWTH_MIB = 96.0  # of all processes together, in one scenario
PEAK_MIB = 512.0
_LOOK_S = 0.1


async def _watched(d: Deployment, most: list[float]) -> None:
    """Keep the largest size that all processes together ever had."""
    while True:
        with contextlib.suppress(OSError, AssertionError):  # one of them ends just now
            most[0] = max(most[0], d.rss_mib())
        await asyncio.sleep(_LOOK_S)


async def run(name: str, d: Deployment) -> Finding:
    done, function = SCENARIOS[name]
    found = Finding(done, d.settled)
    await traffic(d.url, 0.5, RATE)
    await settled(d)
    rows, moved, found.size_mib = d.durable(), moves(d), d.rss_mib()
    first = found.size_mib
    most = [first]
    watch = asyncio.create_task(_watched(d, most))
    try:
        await function(d, found)
        await settled(d)
    except (RuntimeError, AssertionError, OSError, httpx2.HTTPError) as error:
        found.wrong.append(str(error)[:300] or repr(error))
        for pool in d.pools:
            d.behave(pool)
        return found
    finally:
        watch.cancel()
    found.lost = max(0, rows - d.durable()) + max(0, moved - moves(d))
    found.check(not found.lost, "something acknowledged is gone")
    found.grown_mib = d.rss_mib() - found.size_mib
    found.peak_mib = most[0] - first
    found.check(found.grown_mib < GROWTH_MIB, "memory grew")
    found.check(found.peak_mib < PEAK_MIB, "memory grew for a while")
    return found


def findings(names: list[str]) -> Iterator[Finding]:
    """One deployment for all of them: what one leaves behind, the next one meets."""
    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder), logs=True) as d:
        for name in names:
            yield asyncio.run(run(name, d))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS)
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}")
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = [HEAD]
    failed = 0
    ordered = [
        name
        for kind in KINDS
        for name, (_, function) in SCENARIOS.items()
        if function.__module__ == kind.__name__ and name in (options.only or SCENARIOS)
    ]
    for found in findings(ordered):
        print(" | ".join(found.row), flush=True)
        rows.append(found.row)
        failed += bool(found.wrong)
    if options.write:
        text = f"{table(rows)}\n\n{machine()}"
        committed.write(DOCS, text, "python -m benchmarks.gateway.chaos --write")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
