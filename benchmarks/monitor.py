"""What watching a training step costs, beside what TRL and verl compute of the same step.

64 sequences of 8192 trained tokens, one thread, CPU seconds.  All rows are run in turn, round
after round; a row's ratio is to the floor of its own round, one subtraction and one mean in NumPy.
Peers run under interpreters that have them, and are left out without.

    python -m benchmarks.monitor [--trl PYTHON] [--verl PYTHON] [--rounds 15] [--ragged]
                                 [--shape 64x16]: another size of step

Then, on the same step, how much wider the intervals are than those of its tokens one by one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it

import argparse
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.rl import Monitor
from servanda.theory.bounds.importance_weights import PSI, weight_gap
from servanda.theory.stats.histogram import BINS, Binned, ends, moment
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.tally import tally

Array = NDArray[Any]
Row = Callable[[], float]  # CPU seconds of one repetition

SEQUENCES, TOKENS = 64, 8192
TV, TIS = PSI["naive"](), PSI["tis"](2.0)
CLAUSES: dict[str, tuple[Callable[[Array], Array], tuple[float, ...]]] = {
    "mean TV": (lambda x: -np.expm1(np.minimum(x, 0.0)), ()),
    "p97 of abs log ratio": (lambda x: (np.abs(x) > 0.182) * 1.0, (0.182, -0.182)),
    "what TIS leaves, (D + 1) / 2": (lambda x: (weight_gap(x, TIS) + 1) / 2, (math.log(2.0),)),
    "Le Cam, mapped to [0, 1]": (lambda x: (1 - np.tanh(x / 2)) / 2, ()),
}


def step(ragged: bool, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """(train, infer, mask) of one step, float32 as trainers have them; mean |log ratio| .008."""
    rng = np.random.default_rng(0)
    sequences, tokens = shape
    infer_BT = -rng.exponential(0.5, shape)
    spread_BT = -0.02 * infer_BT
    # weights of mean 1, as two distributions have them
    train_BT = infer_BT + spread_BT * rng.standard_normal(shape) - spread_BT**2 / 2
    lengths_B = rng.integers(tokens // 4 if ragged else tokens, tokens + 1, sequences)
    mask_BT = np.arange(tokens) < lengths_B[:, None]
    return train_BT.astype(np.float32), infer_BT.astype(np.float32), mask_BT


def timed(run: Callable[[], object]) -> Row:
    def row() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return row


def own(train_BT: Array, infer_BT: Array, mask_BT: Array) -> dict[str, Row]:
    """Our rows.  Four position bins times two environments are the atoms of eight slices."""
    sequences, tokens = mask_BT.shape
    position_T = np.minimum(np.arange(tokens) // max(1, tokens // 4), 3)
    atom_BT = (position_T + 4 * (np.arange(sequences)[:, None] % 2)).astype(np.int32)
    inside_SA = np.array(
        [
            np.ones(8),
            *(np.arange(8) % 4 == p for p in range(4)),
            *(np.arange(8) // 4 == e for e in range(2)),
            np.arange(8) % 4 > 0,
        ],
        dtype=np.float64,
    )
    binned = [Binned(*ends(*clause)) for clause in CLAUSES.values()]
    monitor = Monitor("verl-sync")
    envs = [f"env {b % 2}" for b in range(sequences)]
    groups = [str(b // 8) for b in range(sequences)]
    steps = iter(range(1 << 30))

    def certificates() -> None:
        count_AW = tally(train_BT, infer_BT, mask_BT, atom_BT, 8)
        count_SW = inside_SA @ count_AW.astype(np.float64)
        missing_S = count_SW[:, BINS].astype(int).tolist()
        for clause in binned:
            clause.moments(count_SW[:, :BINS], missing_S)

    def one_by_one() -> None:
        ratio_N = (train_BT[mask_BT] - infer_BT[mask_BT]).astype(np.float64)
        LogMoment.of(CLAUSES["mean TV"][0](ratio_N))

    def observe() -> None:
        monitor.observe(
            train_BT, infer_BT, mask_BT, groups=groups, labels={"env": envs}, weights=next(steps)
        )

    return {
        "tally, one atom": timed(lambda: tally(train_BT, infer_BT, mask_BT)),
        "tally, eight atoms": timed(lambda: tally(train_BT, infer_BT, mask_BT, atom_BT, 8)),
        "tally and certificates, 8 slices x 4 clauses": timed(certificates),
        "Monitor.observe, preset verl-sync": timed(observe),
        "one certificate without bins, 1 slice x 1 clause": timed(one_by_one),
    }


@contextmanager
def peer(name: str, python: str, folder: str) -> Iterator[dict[str, Row]]:
    """The rows of a peer: one process, which runs a row whenever it is told its name."""
    script = Path(__file__).with_name("monitor_peers.py")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, str(script), name, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told, told_by = process.stdin, process.stdout

    def ask(row: str) -> float:
        told.write(f"{row}\n")
        told.flush()
        return float(told_by.readline())

    try:
        head = told_by.readline().rstrip("\n")
        while head and not head.startswith(f"{name} "):  # imports may print
            head = told_by.readline().rstrip("\n")
        if not head:
            raise SystemExit(f"{python} could not run {name}: is it installed there?")
        title, *rows = head.split("\t")
        yield {f"{title}: {row}": lambda row=row: ask(row) for row in rows}
    finally:
        told.close()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter that has trl")
    parser.add_argument("--verl", metavar="PYTHON", help="interpreter that has verl")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ragged", action="store_true", help="answers of several lengths")
    parser.add_argument("--shape", default=f"{SEQUENCES}x{TOKENS}", help="sequences x tokens")
    options = parser.parse_args()
    sequences, _, width = options.shape.partition("x")
    train_BT, infer_BT, mask_BT = step(options.ragged, (int(sequences), int(width)))
    tokens = int(mask_BT.sum())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arrays = {"train": train_BT, "infer": infer_BT, "mask": mask_BT.astype(np.int64)}
        for part, values in arrays.items():
            np.save(Path(folder) / f"{part}.npy", values)
        rows = {"floor: one subtraction and mean": timed(lambda: (train_BT - infer_BT).mean())}
        rows |= own(train_BT, infer_BT, mask_BT)
        for name in ("trl", "verl"):
            if python := getattr(options, name):
                rows |= stack.enter_context(peer(name, python, folder))
        for row in rows.values():
            row()  # caches, tables and the first step of a monitor
        rounds = [{name: row() for name, row in rows.items()} for _ in range(options.rounds)]
    floor, *_ = rows
    print(f"{tokens:,} trained tokens of {options.shape}, {options.rounds} rounds\n")
    print("| | ms a step | ns per trained token | times the floor |\n|---|---|---|---|")
    for name in rows:
        seconds = statistics.median(times[name] for times in rounds)
        ratio = statistics.median(times[name] / times[floor] for times in rounds)
        print(f"| {name} | {1e3 * seconds:.2f} | {1e9 * seconds / tokens:.1f} | {ratio:.0f} |")
    widths(train_BT[mask_BT], infer_BT[mask_BT])


def widths(train_N: Array, infer_N: Array) -> None:
    """Print each clause's interval at 95 %, from tokens and from bins."""
    ratio_N = train_N.astype(np.float64) - infer_N
    count_K = tally(train_N[None], infer_N[None], np.ones((1, len(ratio_N)), dtype=bool))[0, :BINS]
    print(
        "\n| | mean | interval from tokens | from bins | each end moved by |\n" + "|---" * 5 + "|"
    )
    for name, (x, bends) in CLAUSES.items():
        exact, found = LogMoment.of(x(ratio_N)), moment(count_K, *ends(x, bends))
        ends_exact, ends_found = interval(exact, 0.05), interval(found, 0.05)
        moved = [
            abs(a - b) / a if a else abs(a - b) for a, b in zip(ends_exact, ends_found, strict=True)
        ]
        print(
            f"| {name} | {exact.mean:.5g} | "
            + " | ".join(f"[{low:.5g}, {high:.5g}]" for low, high in (ends_exact, ends_found))
            + f" | {100 * moved[0]:.2f} %, {100 * moved[1]:.2f} % |"
        )


if __name__ == "__main__":
    main()
