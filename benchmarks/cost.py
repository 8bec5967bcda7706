"""What Servanda itself costs: importing, linting, checking, and memory, each beside a floor.

Every number is a ratio to something measured in the same run: a bare interpreter, plain
decoding and scoring of the same batches, a run a hundredth as long.  CPU seconds where one
process is measured, medians of pairs of wall seconds where a process is started.

    python -m benchmarks.cost [--only import lint check golden memory]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from servanda.engines import open_engine
from servanda.runner import run
from servanda.runner.golden import reduced
from servanda.theory.divergence.base import LogitRows
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny-bf16.kernelcontract.yaml"
PAIRS = 9
CLAUSES = 1000
_MANY = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: many}
kernels:
  train: {engine: table, model: p.json}
  infer: {engine: table, model: p.json}
workload: {prompts: p.jsonl}
statistical:
"""
_CLAUSE = "  - {{id: c{i}, metric: tv, aggregate: mean, at_most: 0.{i:04d}1, slices: all}}\n"
_TABLE = '{"tokens": ["a", "."], "eos": ".", "order": 1, "rows": {"": [0.9, 0.1]}}'
_PLAIN = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: cost}}
kernels:
  train: {{engine: transformers, model: {root}/models/tiny-lm, attention: eager, batch_size: 16}}
  infer: {{engine: transformers, model: {root}/models/tiny-lm, dtype: bfloat16, attention: sdpa}}
workload:
  prompts: {root}/data/prompts.jsonl
  sampling: {{temperature: 1.0, max_new_tokens: 24, seed: 7}}
slices:
  - {{name: domain, split: labels.domain}}
  - {{name: long, match: {{request.prompt_tokens: {{gte: 257}}}}}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.5}}
  - {{id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.03, slices: all}}
  - {{id: k3, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.5}}
promotion: {{offline: {{prompt_groups: [192, 192]}}}}
"""


def seconds(*command: str, cwd: Path | None = None) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, cwd=cwd, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def beside(floor: tuple[str, ...], *command: str, cwd: Path | None = None) -> tuple[float, float]:
    """Medians of pairs: (the command's seconds, its ratio to the floor's)."""
    pairs = [(seconds(*command, cwd=cwd), seconds(*floor, cwd=cwd)) for _ in range(PAIRS)]
    return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)


def cost_of_import() -> None:
    parts = ("-c", "import numpy, pydantic, ruamel.yaml")
    took, ratio = beside(parts, "-c", "import servanda")
    row("import servanda", f"{took:.2f} s", f"{ratio:.2f} x its parts")
    took, ratio = beside(parts, "-c", "import servanda; servanda.load, servanda.check")
    loaded = "import servanda, sys; servanda.load; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], check=True)
    row("import servanda, its load and its check", f"{took:.2f} s", f"{ratio:.2f} x its parts")


def cost_of_lint() -> None:
    bare = ("-c", "import numpy, pydantic, ruamel.yaml, click")
    took, ratio = beside(bare, "-m", "servanda", "contract", "lint", str(EXAMPLE))
    row(
        "servanda contract lint of the example",
        f"{took:.2f} s",
        f"{ratio:.2f} x its parts imported",
    )
    with tempfile.TemporaryDirectory() as folder:
        many = Path(folder) / "many.kernelcontract.yaml"
        many.write_text(_MANY + "".join(_CLAUSE.format(i=i) for i in range(1, CLAUSES + 1)))
        (Path(folder) / "p.json").write_text(_TABLE)
        (Path(folder) / "p.jsonl").write_text('{"prompt": "a"}\n')
        command = ("-c", f"import servanda; servanda.load({str(many)!r})")
        took, ratio = beside(bare, *command)
    row(f"reading and linting {CLAUSES:,} clauses", f"{took:.2f} s", f"{ratio:.2f} x imports")


def cost_of_check() -> None:
    """CPU seconds of a whole check over those of plain decoding and scoring."""
    spent: dict[str, float] = {}

    def timed(engine: Any, side: str) -> Any:
        for verb in ("generate", "score"):
            own = getattr(engine, verb)

            def call(*args: Any, own: Any = own, verb: str = verb) -> Any:
                began = time.thread_time()
                found = own(*args)
                # the first scores of train are those of the whole round; the rest is self-noise
                whole = verb == "generate" or (side == "train" and len(args[0]) > 32)
                key = verb if whole else "self-noise"
                spent[key] = spent.get(key, 0.0) + time.thread_time() - began
                return found

            setattr(engine, verb, call)
        return engine

    engines: dict[str, Any] = {}

    def open_(kernel: Any, side: str) -> Any:
        engines[side] = open_engine(kernel)
        return timed(engines[side], side)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cost.kernelcontract.yaml"
        path.write_text(_PLAIN.format(root=ROOT))
        plan = run.compile(run.load(path))
        schedule = plan.schedules[0]
        began: list[float] = []

        def watch(progress: Any) -> None:
            if progress.what == "prompt groups" and not began:
                began.append(time.process_time())

        run.measure(plan, Path(folder) / "run", open=open_, watch=watch)
        total = time.process_time() - began[0] - spent.pop("self-noise")
        plain = open_engine(plan.contract.kernels.infer)
        ids = plain.encode([p.text for p in schedule.corpus.prompts])
        decode = 0.0
        for index in range(schedule.rounds):
            units = sorted(schedule.units(index), key=lambda u: len(ids[u.row]))
            sequences = tuple(u.sequence for u in units)
            batch = Batch(sequences, tuple(tuple(ids[u.row]) for u in units), schedule.width)
            start = time.process_time()
            for chunk in batch.chunks(plan.contract.kernels.infer.batch_size):
                plain.time(chunk, Sampling(), schedule.seed, record=False)
            decode += time.process_time() - start
    floor = decode + spent["score"]
    row(
        "check, sampled metrics (no loading, golden, self-noise)",
        f"{total:.1f} s of CPU",
        f"{total / floor:.2f} x plain decoding and scoring ({floor:.1f} s)",
    )


def cost_of_golden() -> None:
    """CPU seconds of every full-logit metric over those of both kernels' logits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cost.kernelcontract.yaml"
        path.write_text(_PLAIN.format(root=ROOT))
        kernels = run.load(path).kernels
    engines = [open_engine(kernel) for kernel in (kernels.train, kernels.infer)]
    lines = (ROOT / "data" / "golden.jsonl").read_text().splitlines()[:16]

    ids = engines[0].encode([json.loads(line)["prompt"] for line in lines])
    width = max(map(len, ids)) - 1
    texts = tuple(tuple(t[1:]) for t in ids)
    batch = Batch(tuple(range(len(ids))), tuple(tuple(t[:1]) for t in ids), width, texts)
    began = time.process_time()
    pieces = [
        np.concatenate(list(engine.logits(batch, how)))
        for engine, how in zip(engines, ("prefill", "decode"), strict=True)
    ]
    forward = time.process_time() - began
    token_N = np.array([t for text in texts for t in text])
    began = time.process_time()
    for at in range(0, len(token_N), 64):
        reduced(LogitRows(*(p[at : at + 64] for p in pieces)), token_N[at : at + 64])
    took = time.process_time() - began
    row(
        "every full-logit metric on golden texts",
        f"{1e3 * took / len(token_N):.2f} ms a position",
        f"{took / forward:.2f} x both kernels' logits",
    )


def cost_of_memory() -> None:
    peaks = {}
    for n in (1_000, 100_000):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cost", "--sequences", str(n)],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        peaks[n] = float(done.stdout)
    row(
        "peak memory of 100,000 sequences, nine cells",
        f"{peaks[100_000]:.0f} MiB",
        f"{peaks[100_000] / peaks[1_000]:.2f} x that of 1,000",
    )


def _sequences(n: int) -> None:
    """One check of n table sequences; prints the peak of this process, MiB."""
    from tests import kit

    slices = "slices: [{name: first, split: labels.first}, "
    slices += "{name: depth, split: context.position, at: [2, 4]}]"
    with tempfile.TemporaryDirectory() as folder:
        path, _ = kit.write(folder, first=n, last=n, round=256, width=8, slices=slices)
        run.check(path, run_dir=Path(folder) / "run", open=run.in_process)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


COSTS = {
    "import": cost_of_import,
    "lint": cost_of_lint,
    "check": cost_of_check,
    "golden": cost_of_golden,
    "memory": cost_of_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=COSTS, default=[*COSTS])
    parser.add_argument("--sequences", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sequences:
        _sequences(options.sequences)
        return
    row("what", "measured", "beside")
    row("---", "---", "---")
    for name in options.only:
        COSTS[name]()


if __name__ == "__main__":
    main()
