"""Rows of `benchmarks.speed` about evidence: dumps, processes, and the monitor of a trainer."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.speed_rows import Row, beside
from servanda.contract.clause import SliceRule
from servanda.judgement import plan as planning
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.clauses.token_counts import CellStatistics, SliceCounts
from servanda.rl import Monitor
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.statistics import PairFields
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.blocks import blocks, paired
from servanda.rl.steps.contract import corpus_of
from servanda.theory.divergence.base import sampled
from servanda.theory.stats.log_moment import LogMoment

STEPS, SEQUENCES, PROMPT, ANSWER = 8, 512, 128, 1024
COLUMNS = ["token_ids", "mask", "logp_train", "logp_infer", "group", "label.env"]


@functools.cache
def dump_folder(steps: int = STEPS) -> Path:
    """A dump of our own format: float32 logprobs, mean |log ratio| about 0.01."""
    folder = Path(tempfile.mkdtemp(prefix="servanda-speed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rng, writer = np.random.default_rng(0), Writer(folder)
    for step in range(steps):
        length_S = PROMPT + rng.integers(200, ANSWER, size=SEQUENCES)
        infer_S = [-rng.exponential(0.5, size=n).astype(np.float32) for n in length_S]
        train_S = [
            np.minimum(q + rng.normal(0, 0.01, len(q)).astype(np.float32), 0) for q in infer_S
        ]
        writer.step(
            step,
            [rng.integers(0, 150_000, size=n) for n in length_S],
            [np.arange(n) >= PROMPT for n in length_S],
            train_S,
            infer_S,
            groups=[f"g{s // 8}" for s in range(SEQUENCES)],
            labels={"env": [("math", "code", "chat")[s % 3] for s in range(SEQUENCES)]},
        )
    return folder


@functools.cache
def trained_tokens(folder: Path) -> int:
    return sum(int(chunk.mask_N.sum()) for chunk in open_dump(folder).read())


def _read_by_arrow(folder: Path) -> None:
    import pyarrow.parquet as pq

    for path in folder.iterdir():
        pq.read_table(path, columns=COLUMNS, use_threads=False)


def _plan() -> planning.Plan:
    """Four clauses, each on the whole and on eight slices."""
    rules = (
        SliceRule(name="position", split="context.position", at=(64, 128, 256, 512)),  # type: ignore[call-arg]
        *(
            SliceRule(name=env, match={"labels.env": {"in": [env]}})  # type: ignore[call-arg]
            for env in ("math", "code", "chat")
        ),
    )
    _, contract = of_run.contract_of("trl", "speed", rules)
    wanted = ("tv", "k3_nats", "abs_log_ratio_nats", "le_cam")
    first = contract.statistical[0].model_copy(
        update={"slices": ("all", "position", "math", "code", "chat"), "clip": None}
    )
    clauses = [
        first.model_copy(update={"id": name, "metric": name, "at_most": 0.02, "clip": clip})
        for name, clip in zip(wanted, (None, 1.0, 1.0, None), strict=True)
    ]
    contract = contract.model_copy(update={"statistical": tuple(clauses)})
    labels = [(("env", env),) for env in ("math", "code", "chat")]
    return planning.make_plan(contract, {of_run.WORKLOAD: corpus_of("speed", labels)}, None)


def evidence(rounds: int) -> list[Row]:
    """From files of Parquet to certificates, beside Arrow's reading of the same columns."""
    folder, plan = dump_folder(), _plan()
    cells = [cell for cell in plan.cells if isinstance(cell.kind, Certificate)]
    cuts = tuple(dict.fromkeys(cell.cut for cell in cells if cell.cut.name != "all"))
    statistics = CellStatistics(cells, cuts)
    assert (len(cells), len(cuts)) == (4 * 9, 8) and all(statistics.answered)

    def ours() -> None:
        counts = SliceCounts(cuts)
        for block in blocks(open_dump(folder).read()):
            pair = paired(block, 0)
            logp = pair.train.columns["logp"], pair.infer.columns["logp"]
            counts.add(PairFields(pair), *logp, np.ones(len(logp[0]), dtype=bool))
        statistics.of(counts)

    def exactly() -> None:
        """A quarter of the dump, token by token: the definition of each certificate."""
        dump = open_dump(folder)
        for block in blocks(dump.of(dump.steps[: STEPS // 4]).read()):
            pair = paired(block, 0)
            logp = {f"logp_{s}": getattr(pair, s).columns["logp"] for s in ("train", "infer")}
            for metric in dict.fromkeys(cell.clause.metric for cell in cells):
                kind = next(c.kind for c in cells if c.clause.metric == metric)
                assert isinstance(kind, Certificate)
                x_N = kind.feed.x(sampled(metric, logp))
                for mask_N in _masks(pair.position_N, len(cuts) + 1):
                    LogMoment.of(x_N[mask_N])

    def four_times() -> None:
        for _ in range(4):
            exactly()

    peers = {
        "Arrow's reading of the same columns": lambda: _read_by_arrow(folder),
        "each certificate from its tokens": four_times,
    }
    tokens = trained_tokens(folder)
    return beside(
        "Parquet to 36 certificates (4 clauses, 8 slices)", "token", tokens, ours, peers, rounds
    )


def _masks(position_N: np.ndarray, n: int) -> list[np.ndarray]:
    """As many tokens in slices as those of the plan: each token is in the whole and two slices."""
    at_N = position_N % (n // 2)
    ones_N = np.ones(len(position_N), dtype=bool)
    return [ones_N, *(at_N == i for i in range(n // 2)), *(at_N == i for i in range(n // 2))]


def check(rounds: int) -> list[Row]:
    """The whole of `servanda check DIR`, with its data quality checks and its report's numbers."""
    folder = dump_folder()
    peers = {"Arrow's reading of the same columns": lambda: _read_by_arrow(folder)}
    tokens = trained_tokens(folder)
    work = lambda: judge_dump(DumpOptions(folder))  # noqa: E731
    return beside("check of a Parquet dump", "token", tokens, work, peers, rounds)


def processes(rounds: int) -> list[Row]:
    """Elapsed time: only a machine with two idle cores gives the ratio."""
    folder = dump_folder(40)

    def work(jobs: int) -> None:
        judge_dump(DumpOptions(folder, jobs=jobs))

    return beside(
        "check of a Parquet dump, two processes, elapsed time",
        "token",
        trained_tokens(folder),
        lambda: work(2),
        {"one process": lambda: work(1)},
        max(rounds // 3, 1),
        time.perf_counter,
    )


def monitor(rounds: int) -> list[Row]:
    """A step of a trainer, two environments, slices as the preset chooses them."""
    return [row for tokens in (8192, 512) for row in _observed(64, tokens, 3 * rounds)]


def _observed(sequences: int, tokens: int, rounds: int) -> list[Row]:
    rng, shape = np.random.default_rng(0), (sequences, tokens)
    infer_BT = -rng.exponential(0.5, shape).astype(np.float32)
    train_BT = np.minimum(infer_BT + rng.normal(0, 0.01, shape).astype(np.float32), 0)
    mask_BT = np.ones(shape, dtype=bool)
    labels = {"env": [f"e{s % 2}" for s in range(sequences)]}
    observer, steps = Monitor("verl-sync"), iter(range(1_000_000))

    def ours() -> None:
        observer.observe(train_BT, infer_BT, mask_BT, labels=labels, weights=next(steps))

    peers = {"one subtraction and one mean (NumPy)": lambda: (train_BT - infer_BT).mean()}
    path = f"Monitor.observe, {sequences} x {tokens}"
    return beside(path, "token", train_BT.size, ours, peers, rounds)
