"""Does a run's budget of error keep its promise, and how soon are faults found?

    python -m benchmarks.run_budget [--write]      20 minutes on a core

The promise: the probability that any healthy step of a run, however long, or any steps j to t that
are all healthy, are called violated is at most ALPHA.  Monitor.observe judges made-up runs, by
series of steps; three other rules read the e-values of each step alone:

    whole alpha   each step has all of ALPHA
    own share     step t has w_t = 2 / ((t + 1)(t + 2)) of half of ALPHA
    e-process     M_t = e_t (M_{t-1} + w_t), at half of ALPHA; M is 0 after an alarm

Seeds and tolerances below were fixed before the first full run.
"""

# Axes: T steps, C cells, B sequences, W tokens of a sequence, K contexts, V vocabulary.

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from benchmarks import committed
from benchmarks.experiment.tables import markdown
from servanda.rl import Monitor
from servanda.runner.load import parse
from servanda.theory.stats.alpha import attempt_alpha, step_alpha
from servanda.theory.stats.bets import weights_above
from servanda.theory.stats.log_moment import LogMoment

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Tokens = tuple[Floats, Floats, Bools]  # logprobs of train and infer, and the mask, [B, W]
Span = tuple[int, int]  # first and last step that a violation names

ALPHA, LIMIT, CLIPPED = attempt_alpha(0.05, 1), 0.025, 0.03
FIRST_SEED, RUNS = 200, 200  # healthy runs
LENGTHS = 20, 2000  # steps of a healthy run, log-uniform
TIMES = (1.2, 1.5, 2.0, 4.0)  # of the limit: the mean TV of a faulty step
STARTS = (1, 50, 500, 1500)  # first faulty step
FAULTS, WAIT = 16, 100  # runs with a lasting fault, of which half are rare; longest delay
RECENT = 30  # healthy steps before it that are judged; of earlier ones only the number matters
ENDED, BEFORE, AFTER = 60, 50, 100  # runs with a fault that ends; healthy steps around it
LASTING = (1, 5, 20)  # its steps
MOST_RATIO = 1.5  # of the first red step to that of whole alpha, median over the experiment
COMMAND = "python -m benchmarks.run_budget --write"
PAGE = committed.ROOT / "docs" / "explanation" / "verdicts.md"
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


def steps(seed: Sequence[int], times: float, rare: bool) -> Iterator[Tokens]:
    """The tokens of one step after another, whose mean TV is `times` the limit.

    Args:
        seed: its first number is that of the run, and gives the number of sequences of a step.
    """
    rng = np.random.default_rng(seed)
    train_KV, infer_KV = kernels(rng, LIMIT * times * (1 - 1e-12), rare)
    outside_K = ((np.abs(np.log(train_KV / infer_KV)) > 0.182) * infer_KV).sum(axis=1)
    assert times > 1 or outside_K.max() <= CLIPPED + 1e-12  # healthy in every cell
    below_KV = infer_KV.cumsum(axis=1)[:, :-1]
    next_KV = rng.integers(CONTEXTS, size=(CONTEXTS, VOCABULARY))  # the last token is the context
    sequences = int(np.random.default_rng(seed[0]).integers(16, 49))
    while True:
        context_B = rng.integers(CONTEXTS, size=sequences)
        uniform_WB = rng.random((WIDTH, sequences))
        train_BW, infer_BW = np.empty((2, sequences, WIDTH))
        for w in range(WIDTH):
            token_B = (uniform_WB[w][:, None] > below_KV[context_B]).sum(axis=1)
            train_BW[:, w] = train_KV[context_B, token_B]
            infer_BW[:, w] = infer_KV[context_B, token_B]
            context_B = next_KV[context_B, token_B]
        mask_BW = np.arange(WIDTH) < rng.integers(WIDTH // 2, WIDTH + 1, sequences)[:, None]
        yield np.log(train_BW), np.log(infer_BW), mask_BW


class Run:
    """A run that a monitor judges; `log_e` [C] of each step alone, of the same cells."""

    def __init__(self) -> None:
        self.monitor = Monitor(parse(CONTRACT.encode(), "run_budget"))
        self.monitor.numbered_from(1)
        self.log_e: list[Floats] = []

    def observe(self, tokens: Tokens) -> list[Span]:
        """The steps that the monitor calls violated now."""
        step = self.monitor.observe(*tokens)
        assert step.outcome in ("holds", "inconclusive", "violated"), step.cause
        self.log_e.append(log_e(*tokens))
        if step.outcome != "violated":  # `verdict` has intervals, which take long
            return []
        red = [c for c in step.verdict.cells if c.outcome == "violated"]
        return [c.steps or (step.step, step.step) for c in red]


def log_e(train_BW: Floats, infer_BW: Floats, mask_BW: Bools) -> Floats:
    """Of the cells gradient (all, depth < 16, depth >= 16) and clipped, [C]."""
    ratio_BW = train_BW - infer_BW
    tv_BW, late_W = np.maximum(-np.expm1(ratio_BW), 0.0), np.arange(WIDTH) >= 16
    cells = [(tv_BW[mask_BW & own], LIMIT) for own in (True, ~late_W, late_W)]
    cells.append((1.0 * (np.abs(ratio_BW) > 0.182)[mask_BW], CLIPPED))
    return np.array([LogMoment.of(x).log_e_above(m, weights_above(m)) for x, m in cells])


def price(log_e_TC: Floats, part: float) -> float:
    """The log e-value of a violation; each cell has an equal share."""
    return math.log(log_e_TC.shape[1] / ALPHA / part)


def log_weights(log_e_TC: Floats) -> Floats:
    """log w_t, [T]."""
    return np.log([step_alpha(1.0, t) for t in range(1, len(log_e_TC) + 1)])


def e_process(log_e_TC: Floats) -> Bools:
    """The violated steps, by evidence since the last alarm of each cell."""
    log_m_C, red = np.full(log_e_TC.shape[1], -np.inf), []
    for log_e_C, log_w in zip(log_e_TC, log_weights(log_e_TC), strict=True):
        log_m_C = log_e_C + np.logaddexp(log_m_C, log_w)
        alarm_C = log_m_C >= price(log_e_TC, 1 / 2)
        red.append(alarm_C.any())
        log_m_C[alarm_C] = -np.inf
    return np.array(red)


SERIES, WHOLE = "series of steps", "whole alpha"
OFFLINE: Mapping[str, Callable[[Floats], Bools]] = {
    WHOLE: lambda e: e.max(axis=1) >= price(e, 1),
    "own share": lambda e: e.max(axis=1) + log_weights(e) >= price(e, 1 / 2),
    "e-process": e_process,
}
RULES = (*OFFLINE, SERIES)


def share(red: Sequence[bool]) -> tuple[int, int, float, float]:
    """Of runs: red ones, all, and the Clopper-Pearson interval of their share, 95 %."""
    k, n = sum(red), len(red)
    low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    return k, n, low, float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0


def healthy() -> dict[str, Any]:
    """Runs whose mean TV is the limit in every context (even seeds), or half of it."""
    red: dict[str, dict[str, list[bool]]] = {"the limit": {}, "half of it": {}}
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        times = 0.5 if seed % 2 else 1.0
        told = red["half of it" if seed % 2 else "the limit"]
        length = round(math.exp(np.random.default_rng([seed, 0]).uniform(*np.log(LENGTHS))))
        run, spans = Run(), []
        for tokens in islice(steps((seed, 1), times, seed // 2 % 2 == 1), length):
            spans += run.observe(tokens)
        told.setdefault(SERIES, []).append(bool(spans))
        for name, judge in OFFLINE.items():
            told.setdefault(name, []).append(bool(judge(np.array(run.log_e)).any()))
        print(f"healthy run {seed}: {length} steps, called violated: {spans}", flush=True)
    return {at: {name: share(of) for name, of in told.items()} for at, told in red.items()}


def ended() -> dict[str, Any]:
    """Runs at the limit with a fault that ends: are steps called violated that are all healthy?"""
    red: dict[str, list[bool]] = {name: [] for name in RULES}
    for n in range(ENDED):
        seed, rare, m = FIRST_SEED + n, n // 12 % 2 == 1, LASTING[n // 4 % 3]
        parts = ((2, 1.0, BEFORE), (3, TIMES[n % 4], m), (4, 1.0, AFTER))
        run, spans = Run(), []
        for key, times, length in parts:
            for tokens in islice(steps((seed, key), times, rare), length):
                spans += run.observe(tokens)
        found = [last <= BEFORE or first > BEFORE + m for first, last in spans]
        red[SERIES].append(any(found))
        for name, judge in OFFLINE.items():
            red_T = judge(np.array(run.log_e))
            red_T[BEFORE : BEFORE + m] = False
            red[name].append(bool(red_T.any()))
        print(f"ended fault {seed}: {m} steps at {TIMES[n % 4]}, called {spans}", flush=True)
    return {name: share(of) for name, of in red.items()}


def delays() -> list[dict[str, Any]]:
    """Steps from a fault's first to its first alarm; before it the TV is half of the limit."""
    first: dict[tuple[bool, float], dict[str, dict[int, list[float]]]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + FAULTS):
        for start in STARTS:
            rare, before, recent = seed % 2 == 1, Run(), min(start - 1, RECENT)
            before.monitor._state.number = start - 1 - recent
            before.log_e = [np.full(4, -np.inf)] * (start - 1 - recent)
            for tokens in islice(steps((seed, 5), 0.5, rare), recent):
                before.observe(tokens)
            for n, times in enumerate(TIMES):
                told = first.setdefault((rare, times), {name: {} for name in RULES})
                run, delay = copy.deepcopy(before), math.inf
                for t, tokens in enumerate(islice(steps((seed, 6, n), times, rare), WAIT), 1):
                    if delay < math.inf:
                        run.log_e.append(log_e(*tokens))
                    elif run.observe(tokens):
                        delay = t
                told[SERIES].setdefault(start, []).append(delay)
                for name, judge in OFFLINE.items():
                    red = np.flatnonzero(judge(np.array(run.log_e))[start - 1 :])
                    told[name].setdefault(start, []).append(red[0] + 1.0 if len(red) else math.inf)
    return [
        {"rare": rare, "times": times}
        | {name: {start: _median(d) for start, d in of.items()} for name, of in told.items()}
        for (rare, times), told in sorted(first.items())
    ]


def _median(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.5, method="inverted_cdf"))


def experiment() -> dict[str, float]:
    """First red step, from 1, of the faulty runs of the experiment: its median ratio to WHOLE."""
    kept = json.loads(EXPERIMENT.read_text(encoding="utf-8"))
    ratios: dict[str, list[float]] = {name: [] for name in RULES}
    for run, own in kept["runs"].items():
        red = {name: np.flatnonzero(judge(np.array(own))) + 1 for name, judge in OFFLINE.items()}
        red[SERIES] = np.array(kept["series"][run])
        if len(red[WHOLE]):
            for name, of in red.items():
                ratios[name].append(of[0] / red[WHOLE][0] if len(of) else math.inf)
    return {name: float(np.median(of)) for name, of in ratios.items()}


def text_of(found: Mapping[str, Any]) -> str:
    """The tables of the page."""
    rows = []
    for name in RULES:
        shares = [of[name] for of in (*found["healthy"].values(), found["ended"])]
        cells = [f"{k} of {n} [{low:.1%}, {high:.1%}]" for k, n, low, high in shares]
        rows.append((name, *cells, f"{found['experiment'][name]:.2f}"))
    head = ("rule", "runs at the limit", "at half of it", "after a fault", "first red step, ratio")
    late = []
    for row in found["delays"]:
        kind = f"{'rare' if row['rare'] else 'smooth'}, {row['times']:g} x"
        shown = [[f"{d:.0f}" if d < math.inf else "-" for d in row[n].values()] for n in RULES]
        late.append((kind, *(" / ".join(own) for own in shown)))
    return f"{markdown(head, rows)}\n\n{markdown(('fault', *RULES), late)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the tables of {PAGE.name}")
    write = parser.parse_args().write
    found: dict[str, Any] = {"healthy": healthy(), "experiment": experiment()}
    found |= {"ended": ended(), "delays": delays()}
    low = [of[SERIES][2] for of in (*found["healthy"].values(), found["ended"])]
    kept = max(low) <= ALPHA and found["experiment"][SERIES] <= MOST_RATIO
    print(json.dumps(found), f"within the tolerances: {kept}", sep="\n", flush=True)
    if write:
        committed.write(PAGE, text_of(found), COMMAND)


if __name__ == "__main__":
    main()
