"""How fast the hot paths are, each beside a peer or a floor of the same run.

    make bench                            every row
    python -m benchmarks.speed --quick    fewer repetitions

Every row is run in turn with its peer, round after round, in processor seconds of one thread
unless it says otherwise, so that other work on the machine moves both.  A ratio is the median
over the rounds; its interval holds the median of all rounds with 95 % (order statistics).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch read it

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.runner.golden import reduced
from servanda.theory.divergence import row_sums
from servanda.theory.divergence.base import LogitRows

Array = NDArray[Any]
Work = Callable[[], object]

ROUNDS, QUICK = 15, 5
VOCABULARY, POSITIONS = 152_064, 16  # of Qwen2.5 and Qwen3


@dataclass(frozen=True)
class Row:
    """One path beside one peer.

    Args:
        ours, theirs: medians, nanoseconds a unit.
        ratio: median of theirs / ours over the rounds; low, high: its interval.
        unit: of the work, as `pair of logits`.
    """

    path: str
    peer: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float


def beside(
    path: str,
    unit: str,
    units: float,
    ours: Work,
    peers: Mapping[str, Work],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> list[Row]:
    """Time `ours` and each peer in turn, round after round; the first round only warms up."""

    def seconds(work: Work) -> float:
        began = clock()
        work()
        return clock() - began

    timed = [
        (seconds(ours), {name: seconds(peer) for name, peer in peers.items()})
        for _ in range(rounds + 1)
    ][1:]
    rows = []
    for name in peers:
        pairs = [(mine, theirs[name]) for mine, theirs in timed]
        ratio = sorted(their / mine for mine, their in pairs)
        outer = _outer(rounds)
        rows.append(
            Row(
                path,
                name,
                unit,
                statistics.median(mine for mine, _ in pairs) / units * 1e9,
                statistics.median(their for _, their in pairs) / units * 1e9,
                statistics.median(ratio),
                ratio[outer],
                ratio[-1 - outer],
            )
        )
    return rows


def _outer(n: int) -> int:
    """How many order statistics may be left out at each end: the rest holds the median at 95 %."""
    return max(
        (k for k in range(n // 2) if 2 * sum(comb(n, i) for i in range(k + 1)) <= 0.05 * 2**n),
        default=0,
    )


def logits(positions: int = POSITIONS) -> tuple[Array, Array, Array]:
    """Two close kernels at a real vocabulary: noise of 0.01 nats, float32."""
    rng = np.random.default_rng(0)
    infer_RV = rng.normal(0, 3, (positions, VOCABULARY)).astype(np.float32)
    train_RV = infer_RV + rng.normal(0, 0.01, infer_RV.shape).astype(np.float32)
    return train_RV, infer_RV, infer_RV.argmax(axis=-1)


def exact_metrics(rounds: int) -> list[Row]:
    import torch

    torch.set_num_threads(1)
    train_RV, infer_RV, token_R = logits()
    few = slice(0, 2)  # the readable formulas take seconds
    tensors = torch.from_numpy(train_RV), torch.from_numpy(infer_RV)

    def ours() -> None:
        reduced(LogitRows(train_RV, infer_RV), token_R)

    def readable() -> None:
        with _readable_only():
            for _ in range(POSITIONS // 2):
                reduced(LogitRows(train_RV[few], infer_RV[few]), token_R[few])

    def eager() -> None:
        train, infer = (torch.log_softmax(side, dim=-1) for side in tensors)
        _torch_metrics(train, infer)

    peers = {
        "the readable formulas (NumPy, float64)": readable,
        "torch, eager, ten metrics in float32": eager,
        "reading both rows once (torch.sum)": lambda: [side.sum() for side in tensors],
    }
    pairs = POSITIONS * VOCABULARY
    return beside("thirteen exact metrics", "pair of logits", pairs, ours, peers, rounds)


def _torch_metrics(x: Any, y: Any) -> list[Any]:
    """What one writes first, in float32: it keeps few digits where the kernels are close."""
    p, q = x.exp(), y.exp()
    middle = ((p + q) / 2).log()
    ratio = x - y
    return [
        (p - q).abs().sum(-1) / 2,
        (q * -ratio).sum(-1),
        (p * ratio).sum(-1),
        ((p - q) ** 2 / q).sum(-1),
        ((p * (x - middle)).sum(-1) + (q * (y - middle)).sum(-1)) / 2,
        1 - (p * q).sqrt().sum(-1),
        ((p - q) ** 2 / (p + q)).sum(-1) / 2,
        ((q * y).sum(-1) - (p * x).sum(-1)).abs(),
        ratio.abs().amax(-1),
        x.argmax(-1) != y.argmax(-1),
    ]


@contextmanager
def _readable_only() -> Iterator[None]:
    own, row_sums.compiled = row_sums.compiled, lambda: None
    try:
        yield
    finally:
        row_sums.compiled = own


def two_threads(rounds: int) -> list[Row]:
    train_RV, infer_RV, token_R = logits(64)

    def work(threads: str) -> Work:
        def run() -> None:
            os.environ["OMP_NUM_THREADS"] = threads
            reduced(LogitRows(train_RV, infer_RV), token_R)
            os.environ["OMP_NUM_THREADS"] = "1"

        return run

    return beside(
        "thirteen exact metrics, two threads, elapsed time",
        "pair of logits",
        train_RV.size,
        work("2"),
        {"one thread": work("1")},
        rounds,
        time.perf_counter,
    )


def parquet(rounds: int) -> list[Row]:
    from benchmarks import readers

    return readers.parquet(beside, rounds)


def json_lines(rounds: int) -> list[Row]:
    from benchmarks import readers

    return readers.json_lines(beside, rounds)


ROWS: dict[str, Callable[[int], list[Row]]] = {
    "exact": exact_metrics,
    "threads": two_threads,
    "parquet": parquet,
    "json": json_lines,
}


def peak(name: str) -> float:
    """Peak memory of a row's process, MiB."""
    again = [sys.executable, "-m", "benchmarks.speed", "--peak", name]
    done = subprocess.run(again, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--peak", choices=ROWS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        ROWS[asked.peak](1)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    for name in asked.only:
        rows = ROWS[name](QUICK if asked.quick else ROUNDS)
        for row in rows:
            print(
                f"{row.path}: {row.ours:.3g} ns a {row.unit}; {row.peer}: {row.theirs:.3g}, "
                f"{row.ratio:.3g} times ({row.low:.3g} to {row.high:.3g})",
                flush=True,
            )
        print(f"{rows[0].path}: peak memory {peak(name):,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
