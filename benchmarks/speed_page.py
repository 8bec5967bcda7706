"""The page of what is measured: `python -m benchmarks.speed --write`, and the check of CI.

A run of every row is kept in benchmarks/measured/speed.jsonl, one line a run, oldest first.  CI
measures a few rows again, quickly, and fails where a path became twice as slow beside its peer:
both are timed in turn, in processor seconds, so that a busy machine moves both.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import committed
from benchmarks.speed_rows import Row, digits

Known = dict[tuple[str, str], tuple[float, float]]

HISTORY = committed.KEPT / "speed.jsonl"
PAGE = committed.ROOT / "docs" / "explanation" / "performance.md"
WORSE = 2.0  # times slower beside its peer than recorded: a regression, and no noise
# the same on a processor with other vector instructions than the recorded one: half as many
# numbers an instruction slow our C and NumPy's by different factors
WORSE_ELSEWHERE = 4.0
# rows of CI, each of some seconds, and the peer of each that another processor or memory moves
# as it moves ours: the same work in NumPy
CHECKED = {
    "exact": "the readable formulas (NumPy, float64)",
    "evidence": "each certificate from its tokens",
}

# path -> (goal, before): what was asked for, and what was measured before, on two quiet cores
GOALS: Mapping[str, tuple[str, str]] = {
    "thirteen exact metrics": ("6 ns a pair", "84 to 89 ns"),
    "thirteen exact metrics, two threads, elapsed time": ("1.8 times one thread", "-"),
    "Parquet to 36 certificates (4 clauses, 8 slices)": ("25 ns a token", "101 ns a certificate"),
    "check of a Parquet dump": ("-", "1,160 ns a token"),
    "check of a Parquet dump, two processes, elapsed time": ("1.8 times one process", "-"),
    "Monitor.observe, 64 x 8192": ("10 ns a token", "20 ns"),
    "Monitor.observe, 64 x 512": ("60 ns a token", "210 ns"),
    "import of all names": ("0.25 s", "-"),
    "servanda contract lint": ("0.35 s", "0.44 s"),
    "demo to its first line, elapsed": ("3 s", "-"),
}


def write(rows: Sequence[Row], peaks: Mapping[str, float]) -> None:
    """Keep a run of every row, and put its table on the page.

    Args:
        peaks: path -> peak memory of its process, MiB.
    """
    run = {
        "machine": f"{_processor()}, Python {platform.python_version()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "rows": [asdict(row) | {"peak_mib": round(peaks[row.path])} for row in rows],
    }
    with open(HISTORY, "a", encoding="utf-8") as history:
        history.write(json.dumps(run, ensure_ascii=False) + "\n")
    committed.write(PAGE, table(rows, peaks, run["machine"]), "make bench")


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def table(rows: Sequence[Row], peaks: Mapping[str, float], machine: str) -> str:
    lines = [
        f"Measured on {machine}.",
        "",
        "| path | before | goal | now | peer | times the peer's | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal, before = GOALS.get(row.path, ("-", "-"))
        whole = row.unit == "start"
        now = f"{row.ours / 1e9:.2f} s" if whole else f"{digits(row.ours)} ns a {row.unit}"
        slower = sorted((1 / row.low, 1 / row.high))
        ratio = f"{1 / row.ratio:.3g} ({slower[0]:.3g} to {slower[1]:.3g})"
        peak = f"{peaks[row.path]:,.0f} MiB"
        lines.append(f"| {row.path} | {before} | {goal} | {now} | {row.peer} | {ratio} | {peak} |")
    return "\n".join(lines)


def recorded(instructions: str, history: Path = HISTORY) -> Known:
    """(path, peer) -> the newest ratio, and how many times slower is accepted.

    Args:
        instructions: the vector instructions of this processor, as torch names them.
    """
    known: Known = {}
    if history.exists():
        for line in history.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            worse = WORSE if run["instructions"] == instructions else WORSE_ELSEWHERE
            for row in run["rows"]:
                key = row["path"], row["peer"]
                # a run on a processor like this one is never replaced by one on another
                if key not in known or worse <= known[key][1]:
                    known[key] = row["ratio"], worse
    return known


def regressions(rows: Sequence[Row], known: Known) -> list[str]:
    """The rows that became slower beside their peer than is accepted, as sentences."""
    slower = []
    for row in rows:
        if (row.path, row.peer) not in known:
            continue
        before, worse = known[row.path, row.peer]
        if row.high * worse < before:  # the whole interval has to lie beyond
            slower.append(
                f"{row.path}: {1 / row.ratio:.3g} times {row.peer}, recorded were "
                f"{1 / before:.3g}; at most {worse:g} times as much are accepted"
            )
    return slower


def check(rows: Sequence[Row]) -> None:
    """Exit with 1 where a row became much slower than recorded."""
    fair = [row for row in rows if row.peer in CHECKED.values()]
    if worse := regressions(fair, recorded(torch.backends.cpu.get_cpu_capability())):
        print("\n".join(worse), file=sys.stderr)
        sys.exit(1)
