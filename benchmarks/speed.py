"""How fast the hot paths are, each beside a peer or a floor of the same run.

    make bench                            every row, kept, and on docs/explanation/performance.md
    python -m benchmarks.speed --quick    fewer repetitions, printed only
    python -m benchmarks.speed --check    a few rows: 1 where one became twice as slow

Every row is run in turn with its peer, round after round, in processor seconds of one thread
unless it says otherwise, so that other work on the machine moves both.  A ratio is the median
over the rounds; its interval holds the median of all rounds with 95 % (order statistics).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch read it

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import speed_evidence, speed_page
from benchmarks.speed_rows import Row, Work, beside
from servanda.runner.golden import reduced
from servanda.theory.divergence import row_sums
from servanda.theory.divergence.base import LogitRows

Array = NDArray[Any]

ROUNDS, QUICK = 15, 5
VOCABULARY, POSITIONS = 152_064, 16  # of Qwen2.5 and Qwen3


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


def gpu(rounds: int) -> list[Row]:
    """The ratio to one read is the share of the memory's bandwidth; nothing without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    from servanda.engines.tensor_sums import row_sums_of

    infer = 3 * torch.randn(1024, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    train = infer + 0.01 * torch.randn_like(infer)

    def logprobs() -> list[Any]:
        return [torch.log_softmax(side.float(), dim=-1) for side in (train, infer)]

    peers: dict[str, Work] = {
        "reading both rows once (torch.sum)": lambda: [side.sum() for side in (train, infer)],
        "torch, eager, ten metrics in float32": lambda: _torch_metrics(*logprobs()),
    }
    try:
        from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss
    except ImportError:
        print("gpu: liger-kernel is not installed, so its losses are left out")
    else:
        jsd, kl = LigerJSD(), LigerKLDIVLoss(log_target=True)
        peers["Liger, js_nats alone"] = lambda: jsd(*logprobs())
        peers["Liger, kl_nats alone"] = lambda: kl(*logprobs())

    def synchronised(work: Work) -> Work:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    return beside(
        f"thirteen exact metrics in bfloat16 on {torch.cuda.get_device_name()}, elapsed time",
        "pair of logits",
        train.numel(),
        synchronised(lambda: row_sums_of(train, infer)),
        {name: synchronised(peer) for name, peer in peers.items()},
        rounds,
        time.perf_counter,
    )


# what every command of a contract needs, and no code of ours
_LIBRARIES = ("-c", "import numpy, pydantic, click, ruamel.yaml")
_LINT = ("-m", "servanda", "contract", "lint", "examples/tiny-bf16.kernelcontract.yaml")


def _python(*words: str) -> Work:
    """A process from its start to its end; what it prints goes nowhere."""
    return lambda: subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


def _first_line(*words: str) -> Work:
    """A process from its start to the first line that it prints."""

    def work() -> None:
        command, quiet = [sys.executable, *words], subprocess.DEVNULL
        with (
            tempfile.TemporaryDirectory() as folder,
            subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=quiet) as process,
        ):
            assert process.stdout is not None
            line = process.stdout.readline()
            process.kill()  # its children end with it
        assert line, command

    return work


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(rounds: int) -> list[Row]:
    """The start of a process beside that of Python with the libraries of all commands."""
    peers = {"import of NumPy, pydantic, click and ruamel.yaml": _python(*_LIBRARIES)}
    names, lint = _python("-c", "from servanda import *"), _python(*_LINT)
    demo = _first_line("-m", "servanda", "demo", "--quiet")
    return [
        *beside("import of all names", "start", 1, names, peers, rounds, _of_children),
        *beside("servanda contract lint", "start", 1, lint, peers, rounds, _of_children),
        *beside(
            "demo to its first line, elapsed", "start", 1, demo, peers, rounds, time.perf_counter
        ),
    ]


def parquet(rounds: int) -> list[Row]:
    from benchmarks import readers

    return readers.parquet(beside, rounds)


def json_lines(rounds: int) -> list[Row]:
    from benchmarks import readers

    return readers.json_lines(beside, rounds)


ROWS: dict[str, Callable[[int], list[Row]]] = {
    "exact": exact_metrics,
    "threads": two_threads,
    "gpu": gpu,
    "evidence": speed_evidence.evidence,
    "check": speed_evidence.check,
    "processes": speed_evidence.processes,
    "monitor": speed_evidence.monitor,
    "start": start,
    "parquet": parquet,
    "json": json_lines,
}


def _high_water() -> float:
    """Peak memory of this process, MiB; what getrusage says begins with that of its parent."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) / 1024


def peak(name: str) -> float:
    """Peak memory of a row's process, MiB."""
    again = [sys.executable, "-m", "benchmarks.speed", "--peak", name]
    done = subprocess.run(again, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--write", action="store_true", help="keep the run, and write the page")
    parser.add_argument(
        "--check", action="store_true", help="fail where a few rows became twice as slow"
    )
    parser.add_argument("--peak", choices=ROWS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        ROWS[asked.peak](1)
        print(_high_water())
        return
    rows: list[Row] = []
    peaks: dict[str, float] = {}
    for name in speed_page.CHECKED if asked.check else asked.only:
        measured = ROWS[name](QUICK if asked.quick or asked.check else ROUNDS)
        rows += measured
        if not measured:
            print(f"{name}: skipped: no GPU", flush=True)
            continue
        for row in measured:
            print(row, flush=True)
        if not asked.check:
            peaks |= dict.fromkeys({row.path for row in measured}, peak(name))
            print(f"{measured[0].path}: peak memory {peaks[measured[0].path]:,.0f} MiB", flush=True)
    if asked.check:
        speed_page.check(rows)
    if asked.write:
        speed_page.write(rows, peaks)


if __name__ == "__main__":
    main()
