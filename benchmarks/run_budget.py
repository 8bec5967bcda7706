"""Which budget of error for a whole run detects faults sooner, and does it keep its promise?

    python -m benchmarks.run_budget [--runs 200] [--seeds 50] [--write]

The promise: the probability that any healthy step of a run, of whatever length, is called violated
is at most ALPHA.  Monitor.observe judges each step of made-up runs alone; every procedure then
reads the same log e-values of the same cells.

    today         each step has the whole ALPHA
    series, log   step t has the share w_t: 2 / ((t + 1) (t + 2)), or one near 1 / (t log(t + 2)^2)
    e-process     M_t = e_t (M_{t-1} + w_t), with the weights of either series

The number after a name is the share of ALPHA that the steps have; "reset" sets M of a cell to 0
after its alarm.  Seeds and tolerances below were fixed before the first full run.
"""

# Axes: T steps, C cells, B sequences, W tokens of a sequence, K contexts, V vocabulary.

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta
from servanda.rl.dumps.window import step_part

from servanda.rl import Monitor
from servanda.runner.load import parse

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ALPHA, LIMIT = 0.05, 0.025
RUNS, SEEDS = 200, 50  # seeds 0, 1, ... of healthy runs, and of runs with a fault
LENGTHS = 20, 2000  # steps of a healthy run, log-uniform
TIMES = (1.2, 1.5, 2.0, 4.0)  # of the limit: the mean TV of a faulty step
STARTS = (1, 50, 500, 1500)  # first faulty step
LASTING = (1, 5, 20)  # steps of a fault that ends
BEFORE, AFTER, WAIT = 50, 200, 200  # healthy steps around such a fault; longest delay
MOST_RATIO = 1.5  # of the first red step to today's, median over the runs of the experiment
KEPT = Path(__file__).parent / "measured" / "run_budget.json"
EXPERIMENT = Path(__file__).parent / "experiment" / "log_e.json"

WIDTH, CONTEXTS, VOCABULARY = 40, 32, 16
# |log ratio| of the rare token is log 6: at the limit 3 % of the tokens are outside the clip range,
# which is the limit of the other clause
LOST = 5 / 6
CONTRACT = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: run-budget, version: 1.0.0, description: The errors of the preset verl-sync.}
kernels: {train: {engine: external}, infer: {engine: external}}
weights: {changes: every_step}
workload: {source: trainer, sampling: {max_new_tokens: 40}}
claim: realised
slices:
  - {name: depth, split: context.position, at: [16]}
statistical:
  - {id: gradient, metric: tv, aggregate: mean, at_most: 0.025, slices: [all, depth]}
  - {id: clipped, metric: abs_log_ratio_nats, aggregate: p97, at_most: 0.182, slices: [all]}
"""


def kernels(rng: np.random.Generator, tv: float, rare: bool) -> tuple[Floats, Floats]:
    """(train, infer), [K, V] each, whose TV is `tv` in every context.

    Args:
        rare: token 0 lost LOST of its mass; else every second token lost a little.
    """
    infer_KV = rng.dirichlet(np.full(VOCABULARY, 2.0), CONTEXTS)
    lost_V = np.arange(VOCABULARY) % 2 == 1
    if rare:
        lost_V = np.arange(VOCABULARY) == 0
        infer_KV *= (1 - tv / LOST) / infer_KV[:, 1:].sum(axis=1, keepdims=True)
        infer_KV[:, 0] = tv / LOST
    down_K1 = infer_KV[:, lost_V].sum(axis=1, keepdims=True)
    return infer_KV * np.where(lost_V, 1 - tv / down_K1, 1 + tv / (1 - down_K1)), infer_KV


def log_e(seed: Sequence[int], tv: float, rare: bool, steps: int) -> Floats:
    """Log e-values of the steps, each alone, [T, C]; every cell has a price."""
    rng = np.random.default_rng(seed)
    train_KV, infer_KV = kernels(rng, tv, rare)
    outside_K = ((np.abs(np.log(train_KV / infer_KV)) > 0.182) * infer_KV).sum(axis=1)
    assert tv > LIMIT or outside_K.max() <= 0.03 + 1e-12, outside_K.max()  # healthy in every cell
    below_KV = infer_KV.cumsum(axis=1)[:, :-1]
    next_KV = rng.integers(CONTEXTS, size=(CONTEXTS, VOCABULARY))  # the last token is the context
    monitor = Monitor(parse(CONTRACT.encode(), "run_budget"))
    monitor._state.most = 1  # a thin step is not judged together with those before it
    sequences = int(rng.integers(16, 49))
    found = []
    for _ in range(steps):
        context_B = rng.integers(CONTEXTS, size=sequences)
        uniform_WB = rng.random((WIDTH, sequences))
        train_BW, infer_BW = np.empty((2, sequences, WIDTH))
        for w in range(WIDTH):
            token_B = (uniform_WB[w][:, None] > below_KV[context_B]).sum(axis=1)
            train_BW[:, w] = train_KV[context_B, token_B]
            infer_BW[:, w] = infer_KV[context_B, token_B]
            context_B = next_KV[context_B, token_B]
        mask_BW = np.arange(WIDTH) < rng.integers(WIDTH // 2, WIDTH + 1, sequences)[:, None]
        step = monitor.observe(np.log(train_BW), np.log(infer_BW), mask_BW)
        judged: Any = step._verdict  # `verdict` has intervals, which take as long as all the rest
        verdict = judged(intervals=False)
        found.append([c.e_violated for c in verdict.cells if c.section == "statistical"])
        assert verdict.price_cells == len(found[-1])
    return np.array(found)


@cache
def log_weights(name: str, steps: int) -> Floats:
    """log w_t of steps 1, 2, ..., [T]; over all steps the sum of w_t is at most 1.

    >>> [round(float(np.exp(log_weights(name, 2))[1]), 3) for name in ("series", "log")]
    [0.167, 0.138]
    """
    if name == "series":
        return np.log([step_part(t) for t in range(1, steps + 1)])
    t_T = np.arange(1.0, 1e6)
    total = float((1 / (t_T * np.log(t_T + 2) ** 2)).sum()) + 1 / math.log(t_T[-1])  # the rest
    return -np.log(t_T[:steps] * np.log(t_T[:steps] + 2) ** 2 * total)


def own_step(log_e_TC: Floats, part: float, weights: str) -> Bools:
    """The violated steps, if each is judged by its own e-value at its part of ALPHA."""
    log_w_T = log_weights(weights, len(log_e_TC)) if weights else np.zeros(len(log_e_TC))
    return log_e_TC.max(axis=1) >= math.log(log_e_TC.shape[1] / ALPHA / part) - log_w_T


def e_process(log_e_TC: Floats, part: float, weights: str, reset: bool) -> Bools:
    """The violated steps, by evidence of the run so far."""
    log_m_C, red = np.full(log_e_TC.shape[1], -np.inf), []
    for log_e_C, log_w in zip(log_e_TC, log_weights(weights, len(log_e_TC)), strict=True):
        log_m_C = log_e_C + np.logaddexp(log_m_C, log_w)
        alarm_C = log_m_C >= math.log(len(log_m_C) / ALPHA / part)
        red.append(alarm_C.any())
        if reset:
            log_m_C[alarm_C] = -np.inf
    return np.array(red)


PROCEDURES: Mapping[str, Callable[[Floats], Bools]] = {
    "today": lambda e: own_step(e, 1, ""),
    "series 1": lambda e: own_step(e, 1, "series"),
    "series 1/2": lambda e: own_step(e, 1 / 2, "series"),
    "series 1/4": lambda e: own_step(e, 1 / 4, "series"),
    "log 1/2": lambda e: own_step(e, 1 / 2, "log"),
    "log 1/4": lambda e: own_step(e, 1 / 4, "log"),
    "e-process 1/2": lambda e: e_process(e, 1 / 2, "series", False),
    "e-process 1/2 reset": lambda e: e_process(e, 1 / 2, "series", True),
    "log e-process 1/2": lambda e: e_process(e, 1 / 2, "log", False),
    "log e-process 1/2 reset": lambda e: e_process(e, 1 / 2, "log", True),
}


def share(red: Sequence[bool]) -> dict[str, Any]:
    """Of runs: how many have a red step, and the Clopper-Pearson interval of their share, 95 %."""
    k, n = sum(red), len(red)
    low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    high = float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
    return {"red": k, "runs": n, "interval": [round(low, 4), round(high, 4)]}


def healthy(runs: int) -> dict[str, Any]:
    """Runs whose mean TV is the limit in every context (even seeds), or half of it."""
    red: dict[str, dict[str, list[bool]]] = {name: {} for name in PROCEDURES}
    steps = {"at the limit": 0, "at half of it": 0}
    red_steps = {name: dict.fromkeys(steps, 0) for name in PROCEDURES}
    for seed in range(runs):
        kind = "at half of it" if seed % 2 else "at the limit"
        length = round(math.exp(np.random.default_rng([seed, 0]).uniform(*np.log(LENGTHS))))
        tv = LIMIT * (0.5 if seed % 2 else 1 - 1e-12)
        log_e_TC = log_e((seed, 1), tv, seed // 2 % 2 == 1, length)
        steps[kind] += length
        for name, judge in PROCEDURES.items():
            red_T = judge(log_e_TC)
            red_steps[name][kind] += int(red_T.sum())
            for part in (kind, "all"):
                red[name].setdefault(part, []).append(bool(red_T.any()))
        print(f"healthy run {seed}: {length} steps", flush=True)
    shares = {name: {part: share(of) for part, of in by.items()} for name, by in red.items()}
    return {"steps": steps, "red_steps": red_steps, "runs": shares}


Streams = list[dict[float, Floats]]  # of a seed: TV in limits -> log e [T, C]


def streams(seeds: int) -> Streams:
    """Steps at several TV, of which runs are put together: a step is judged alone."""
    steps = {**dict.fromkeys((0.5, 1.0), BEFORE + AFTER), **dict.fromkeys(TIMES, WAIT)}
    found: Streams = []
    for seed in range(seeds):
        found.append({})
        for n, (times, length) in enumerate(steps.items()):
            tv = LIMIT * times * (1 - 1e-12)
            found[-1][times] = log_e((seed, 2, n), tv, seed % 2 == 1, length)
    return found


def delays(seen: Streams) -> Iterator[dict[str, Any]]:
    """Steps from a fault's first to its first alarm, 1 at once: the median, and how many found.

    Before the fault the mean TV is half of the limit; the healthy steps of a seed repeat.
    """
    for times in TIMES:
        for start in STARTS:
            first: dict[str, list[float]] = {name: [] for name in PROCEDURES}
            for own in seen:
                before_TC = np.resize(own[0.5], (start - 1, own[0.5].shape[1]))
                log_e_TC = np.concatenate([before_TC, own[times]])
                for name, judge in PROCEDURES.items():
                    red = np.flatnonzero(judge(log_e_TC)[start - 1 :])
                    first[name].append(float(red[0]) + 1 if len(red) else math.inf)
            row: dict[str, Any] = {"times": times, "start": start}
            for kind, part in {"smooth": slice(0, None, 2), "rare": slice(1, None, 2)}.items():
                row[kind] = {name: middle(of[part]) for name, of in first.items()}
            yield row | {"all": {name: middle(of) for name, of in first.items()}}


def middle(first: Sequence[float]) -> dict[str, Any]:
    """The median, null where fewer than half were found, and how many were."""
    median = float(np.quantile(first, 0.5, method="inverted_cdf"))
    told = None if math.isinf(median) else median
    return {"median": told, "found": sum(map(math.isfinite, first)), "runs": len(first)}


def after_a_fault(seen: Streams) -> Iterator[dict[str, Any]]:
    """Runs, and steps, that are called violated after the fault has ended, though healthy."""
    for level in (0.5, 1.0):
        for times in TIMES:
            for m in LASTING:
                told = {}
                for name, judge in PROCEDURES.items():
                    red: list[int] = []
                    for own in seen:
                        around = np.split(own[level][: BEFORE + AFTER], [BEFORE])
                        run_TC = np.concatenate([around[0], own[times][:m], around[1]])
                        red.append(int(judge(run_TC)[BEFORE + m :].sum()))
                    told[name] = share([n > 0 for n in red]) | {"steps": sum(red)}
                yield {"healthy_at": level, "times": times, "lasting": m, "runs": told}


def experiment() -> dict[str, Any]:
    """First red steps, from 1, of the faulty runs of the experiment; their ratios to today's."""
    first: dict[str, dict[str, int | None]] = {}
    for run, own in json.loads(EXPERIMENT.read_text(encoding="utf-8"))["runs"].items():
        log_e_TC = np.array(own)
        told = {n: np.flatnonzero(j(log_e_TC)) for n, j in PROCEDURES.items()}
        first[run] = {n: int(red[0]) + 1 if len(red) else None for n, red in told.items()}
    ratio = {}
    for name in PROCEDURES:
        found = [(own[name], own["today"]) for own in first.values() if own["today"]]
        ratios = [a / b if a else math.inf for a, b in found if b]
        ratio[name] = float(np.median(ratios)) if ratios else math.nan
    return {"first_red": first, "median_ratio": ratio}


def broken(found: Mapping[str, Any]) -> list[str]:
    """The tolerances that are not met."""
    told = [
        (n, part, own) for n, by in found["healthy"]["runs"].items() for part, own in by.items()
    ]
    for row in found["after"]:  # an e-process promises only its first alarm
        part = f"after {row['lasting']} steps at {row['times']}, others at {row['healthy_at']}"
        told += [(n, part, own) for n, own in row["runs"].items() if "e-process" not in n]
    red = [
        f"{name}: {own['red']} of {own['runs']} runs have a red healthy step, {part}"
        for name, part, own in told
        if name != "today" and own["interval"][0] > ALPHA
    ]
    ratio = found["experiment"]["median_ratio"]
    return red + [f"{n}: ratio {r:.2f}" for n, r in ratio.items() if not r <= MOST_RATIO]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help=f"write {KEPT.name}")
    asked = parser.parse_args()
    seen = streams(asked.seeds)
    found: dict[str, Any] = {"command": "python -m benchmarks.run_budget --write"}
    found |= {"experiment": experiment(), "healthy": healthy(asked.runs)}
    found |= {"delays": [*delays(seen)], "after": [*after_a_fault(seen)]}
    found["broken"] = broken(found)
    if asked.write:
        KEPT.write_text(f"{json.dumps(found)}\n", encoding="utf-8")
    print("\n".join(found["broken"]) if asked.write else json.dumps(found))


if __name__ == "__main__":
    main()
