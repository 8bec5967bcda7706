"""Two leaders of one state in PostgreSQL, killed and stopped while rows and pins come.

    python -m benchmarks.gateway.leaders [--times N] [--write]

Needs PostgreSQL (initdb in /usr/lib/postgresql/*/bin) and `pip install 'servanda[postgres]'`.
Writes the table of docs/how-to/gateway.md.  Exits with 1 if anything acknowledged was lost, or both
leaders spoke.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks import committed

PAGE = committed.ROOT / "docs" / "how-to" / "gateway.md"
SAYS = {
    ("killed", "led"): "`kill -9` of the leader that led",
    ("killed", "waited"): "`kill -9` of the leader that waited",
    ("stopped", "led"): "SIGSTOP of the leader that led, until the other led",
    ("stopped", "waited"): "SIGSTOP of the leader that waited",
    ("database", "led"): "a crash and restart of PostgreSQL",
}


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    options.add_argument("--times", type=int, default=135)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()

    from tests import cluster
    from tests.gateway import two_leaders
    from tests.gateway.controller.test_kills import expected

    with cluster.running() as own, tempfile.TemporaryDirectory() as folder:
        told, rows, samples, entries, wrong = two_leaders.survived(
            Path(folder), own, given.times, stops=0.1, restarts=0.07
        )
    counted = Counter((sample.at, sample.slice, sample.clause) for sample in samples)
    wanted = {*expected(rows)}
    reasons = Counter(entry.body.get("reason") for entry in entries)
    lost = len(wanted - {*counted}) + sum(not reasons[pin] for pin in told.pins)
    twice = sum(n - 1 for n in counted.values()) + sum(reasons[pin] > 1 for pin in told.pins)
    gaps: dict[tuple[str, str], list[float]] = {}
    for (what, which), seconds in told.gaps_s.items():
        gaps.setdefault((what, "led" if what == "database" else which), []).extend(seconds)
    lines = ["| event | times | seconds until the next row was acknowledged, median / longest |"]
    lines.append("|---|---|---|")
    lines += [
        f"| {says} | {len(gaps[key])} | {median(gaps[key]):.1f} / {max(gaps[key]):.1f} |"
        for key, says in SAYS.items()
        if key in gaps
    ]
    terms = len({term for term, _ in told.terms})
    lines += [
        "",
        f"{len(rows):,} rows and {len(told.pins):,} pins were acknowledged by {terms} terms of the "
        f"lead: {lost} were lost, and {twice} counted twice. {len(told.terms):,} replies of the "
        f"two leaders: {told.overlaps} of an earlier term after one of a later term. Problems of "
        f"the ledger: {len(wrong)}.",
    ]
    text = "\n".join(lines)
    print(text)
    if given.write:
        command = f"python -m benchmarks.gateway.leaders --times {given.times}"
        committed.write(PAGE, text, command)
    return int(bool(lost or twice or told.overlaps or told.fell or wrong))


if __name__ == "__main__":
    sys.exit(main())
