# Requests until a heartbeat detects a fault: python -m benchmarks.heartbeat
#
# Each fault is a real server of a table of probabilities (`servanda tools serve-kernel`), of whose
# answers only texts are read.  Beside it, at the same number of requests and the same alpha, the
# two-sample test of Model Equality Testing (arXiv 2410.20247): MMD with a Hamming kernel over the
# words of whole answers, whose permutations stay within a prompt.  False alarms are simulated:
# answers of the reference itself, many lives of a heartbeat, judged after every answer.

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import click
import numpy as np

from benchmarks import committed
from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names, open_engine
from servanda.engines.base import Engine
from servanda.runner.heartbeat.baseline import Baseline, plain
from servanda.runner.heartbeat.baseline_source import (
    RecordOptions,
    from_endpoint,
    from_kernel,
    prompt_ids,
)
from servanda.runner.heartbeat.beat import Beat
from servanda.runner.heartbeat.beat_state import TESTS, BeatState, Settings
from servanda.runner.heartbeat.endpoint import Endpoint
from servanda.runner.heartbeat.response_rank import BINS, SCORES, RankScorer
from servanda.theory.black_box.answer_classes import RATES, STRENGTHS, AnswerClasses
from servanda.theory.black_box.restarts import Restarts
from servanda.theory.sampling import Sampling
from servanda.theory.stats.bets import Floats, log_mean_exp
from servanda.traces.trace import Batch

PAGE = committed.ROOT / "docs" / "how-to" / "heartbeat.md"
ALPHA, TOLERANCE, BUDGET, EACH, SEEDS = 0.01, 0.02, 200, 8, (1, 2, 3, 4, 5)
PERMUTATIONS = 200
NULL_RUNS, NULL_BEATS, NULL_ALPHA = 500, 25, 0.05
TOKENS, WIDTH, CONTEXT_SD = 48, 24, 1.5  # of the tables, and the spread of their logits, nats


@dataclass(frozen=True)
class Fault:
    """A faulty endpoint.

    Args:
        noise: standard deviation of what is added to each logit, nats.
        sampler: fault of the catalogue, as a kernel string has it.
    """

    name: str
    noise: float = 0.0
    sampler: str = ""


FAULTS = (
    Fault("none"),
    Fault("logit noise 0.02", 0.02),
    Fault("logit noise 0.1", 0.1),
    Fault("logit noise 0.3", 0.3),
    Fault("another model", 3.0),
    Fault("temperature 0.7", sampler="undisclosed_temperature:0.7"),
    Fault("top-p 0.95", sampler="undisclosed_top_p:0.95"),
    Fault("top-p 0.8", sampler="undisclosed_top_p:0.8"),
)


def written_table(folder: Path, noise: float) -> tuple[str, Floats]:
    """The kernel string of a table, and its probabilities [C, V]; the weights are always equal."""
    words = [f"w{i}" for i in range(TOKENS - 1)] + ["<eos>"]
    logits_CV = CONTEXT_SD * np.random.default_rng(1).standard_normal((TOKENS, TOKENS))
    logits_CV += noise * np.random.default_rng(2).standard_normal((TOKENS, TOKENS))
    p_CV = np.exp(logits_CV)
    p_CV /= p_CV.sum(axis=1, keepdims=True)
    rows = dict(zip(["", *words[:-1]], p_CV.tolist(), strict=True))
    path = folder / f"table-{noise:g}.json"
    told = {"tokens": words, "eos": "<eos>", "order": 1, "rows": rows}
    path.write_text(json.dumps(told), encoding="utf-8")
    return f"table:{path}", p_CV


@contextlib.contextmanager
def served(kernel: str) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    command = [sys.executable, "-m", "servanda", "tools", "serve-kernel", kernel, "--port", "0"]
    command += ["--wait-ms", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            found = re.search(r"http://\S+", line)
            assert found is not None, line
            yield found[0]
        finally:
            process.terminate()


def detected(
    endpoint: Endpoint, baseline: Baseline, scorer: RankScorer | None, seed: int
) -> tuple[int | None, str]:
    """Requests until a change is found, and the test that found it; None after a day's budget."""
    tests = TESTS if scorer else ("border", "replay")
    settings = Settings(baseline.digest, "", "", tests, ALPHA, TOLERANCE, seed)
    state = BeatState.begin(settings, baseline)
    now = datetime.now(timezone.utc)
    while not state.changed:
        beat = Beat(endpoint, baseline, state, lambda: None, lambda: now, scorer, BUDGET, EACH)
        if beat.left <= 0:
            return None, ""
        beat.run()
    return state.asked, state.changed.split(" by ")[1].split(",")[0]


def mmd_rejects(ours: list[list[str]], theirs: list[list[str]], seed: int) -> bool:
    """Whether MMD with a Hamming kernel tells answers apart, at ALPHA.

    Args:
        ours, theirs: answers to each prompt.
    """
    rng = np.random.default_rng(seed)
    total, permuted = 0.0, np.zeros(PERMUTATIONS)
    for a, b in zip(ours, theirs, strict=True):
        words = np.array([[*text.split(), *[""] * WIDTH][:WIDTH] for text in (*a, *b)])
        same = (words[:, None] == words[None]).mean(axis=2)
        np.fill_diagonal(same, 0.0)

        def gap(order: np.ndarray, same: np.ndarray = same, n: int = len(a)) -> float:
            x, y = order[:n], order[n:]
            m = len(y)
            inside = same[np.ix_(x, x)].sum() / (n * (n - 1))
            inside += same[np.ix_(y, y)].sum() / (m * (m - 1))
            return float(inside - 2 * same[np.ix_(x, y)].mean())

        total += gap(np.arange(len(words)))
        permuted += [gap(rng.permutation(len(words))) for _ in range(PERMUTATIONS)]
    return bool((1 + (permuted >= total).sum()) / (1 + PERMUTATIONS) <= ALPHA)


def answers(
    engine: Engine, prompts: list[tuple[int, ...]], each: int, seed: int
) -> list[list[str]]:
    """`each` answers of a kernel to each prompt."""
    eos = set(engine.describe().eos)
    found = []
    for row, ids in enumerate(prompts):
        numbers = tuple(range(row * each, (row + 1) * each))
        drawn = engine.generate(Batch(numbers, (ids,) * each, WIDTH), Sampling(), seed)
        tokens = [[t for t in c if t not in eos] for c in drawn.continuations]
        found.append([plain(text) for text in engine.decode(tokens)])
    return found


def false_alarms(baseline: Baseline, exact: bool) -> float:
    """Share of simulated lives with a false alarm at any answer, at NULL_ALPHA."""
    alarms = 0
    for run in range(NULL_RUNS):
        rng = np.random.default_rng([run, exact])
        truths = [np.array(one.p) for one in baseline.borders]
        classes = [
            AnswerClasses.of_probabilities(one.p)
            if exact
            else AnswerClasses.of_draws(tuple(rng.multinomial(48, p / p.sum()).tolist()))
            for one, p in zip(baseline.borders, truths, strict=True)
        ]
        ranks = [AnswerClasses.of_probabilities((1 / BINS,) * BINS) for _ in SCORES]
        equal = int(rng.binomial(12, 0.8))
        replay = AnswerClasses.of_draws((equal, 12 - equal))
        border = Restarts.of(len(STRENGTHS))
        rank, replays = Restarts.of(len(STRENGTHS) * len(SCORES)), Restarts.of(len(RATES))
        highest = -math.inf
        for unit in range(NULL_BEATS * EACH):
            if unit % EACH == 0:
                border, rank, replays = border.begin(), rank.begin(), replays.begin()
            kind = unit % 4
            if kind in (0, 2):
                row = unit // 2 % len(classes)
                answer = int(rng.choice(len(truths[row]), p=truths[row] / truths[row].sum()))
                place = classes[row].place(answer, rng.random())
                border = border.after(classes[row].log_factors(place))
                classes[row] = classes[row].after(answer, place)
            elif kind == 1 and exact:
                places = (int(rng.random() * BINS), int(rng.random() * BINS))
                factors = [c.log_factors(p) for c, p in zip(ranks, places, strict=True)]
                rank = rank.after(np.concatenate(factors))
                ranks = [c.after(p, p) for c, p in zip(ranks, places, strict=True)]
            elif kind == 3:
                answer = int(rng.random() >= 0.8)
                place = replay.place(answer, rng.random())
                replays = replays.after(replay.log_rate_factors(place))
                replay = replay.after(answer, place)
            parts = [border.log_e, replays.log_e, *([rank.log_e] if exact else [])]
            highest = max(highest, log_mean_exp(np.array(parts)))
        alarms += highest >= math.log(1 / NULL_ALPHA)
    return alarms / NULL_RUNS


def shown(found: list[tuple[int | None, str]]) -> str:
    """Median requests until detection, how many detected it, and the tests that did."""
    numbers = [math.inf if n is None else n for n, _ in found]
    middle = statistics.median(numbers)
    tests = ", ".join(sorted({by for _, by in found if by}))
    times = sum(n < math.inf for n in numbers)
    if not times:
        return f"not in {BUDGET}"
    text = f"> {BUDGET}" if middle == math.inf else f"{middle:.0f}"
    return f"{text} ({tests}; {times} of {len(found)})"


def table(folder: Path, say: Callable[[str], None]) -> str:
    """Every number, as the page shows it."""
    kernel_text, p_CV = written_table(folder, 0.0)
    texts = [f"w{i}" for i in range(TOKENS - 1)]
    healthy = parse_kernel(kernel_text, engines=engine_names())
    exact = from_kernel(kernel_text, healthy, texts, RecordOptions(width=WIDTH))
    engine = open_engine(healthy)
    ids = prompt_ids(engine, exact.prompts, False)
    scorer = RankScorer(engine, healthy, exact, ids)
    each = BUDGET // len(ids)
    how = RecordOptions(candidates=24, draws=48, width=WIDTH)
    with served(kernel_text) as url:
        at = parse_kernel(url, engines=engine_names())
        drawn = from_endpoint(url, at, texts, how, True, lambda _: None)
    reference = [answers(engine, ids, each, 100 + seed) for seed in SEEDS]
    rows = []
    for fault in FAULTS:
        text, q_CV = written_table(folder, fault.noise)
        text += f",fault={fault.sampler}" if fault.sampler else ""
        found = []
        with served(text) as url:
            for baseline, by in ((exact, scorer), (drawn, None)):
                endpoint = Endpoint(parse_kernel(url, engines=engine_names()))
                found.append([detected(endpoint, baseline, by, seed) for seed in SEEDS])
                endpoint.close()
        faulty = open_engine(parse_kernel(text, engines=engine_names()))
        rejected = 0
        for seed, ours in zip(SEEDS, reference, strict=True):
            rejected += mmd_rejects(ours, answers(faulty, ids, each, 200 + seed), seed)
        faulty.close()
        tv = "-" if fault.sampler else f"{np.abs(p_CV - q_CV).sum(axis=1).mean() / 2:.3f}"
        cells = (fault.name, tv, *map(shown, found), f"{rejected} of {len(SEEDS)}")
        rows.append(f"| {' | '.join(cells)} |")
        say(rows[-1])
    alarms = [false_alarms(exact, kind) for kind in (True, False)]
    engine.close()
    return "\n".join(
        [
            f"Median number of requests until a change was detected at α = {ALPHA:g}, over "
            f"{len(SEEDS)} seeds, with the tests that detected it and the number of seeds; at most "
            f"{BUDGET} requests. The endpoints are servers of tables of {TOKENS} tokens, and the "
            "fault is there from the first beat on. TV: mean total variation of the next token at "
            "temperature 1. MMD: number of seeds in which the fixed-sample test of Model Equality "
            f"Testing rejects with {each * len(ids)} answers of each side.",
            "",
            "| fault | TV | reference: a kernel | reference: the endpoint before | MMD |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"False alarms in {NULL_RUNS} simulated lives of {NULL_BEATS * EACH} requests at "
            f"α = {NULL_ALPHA:g}, judged after every answer: {alarms[0]:.1%} against exact "
            f"probabilities, {alarms[1]:.1%} against draws.",
        ]
    )


@click.command()
@click.option("--write", is_flag=True, help="Keep the numbers, and put them into the page.")
def main(write: bool) -> None:
    """Measure, print, and keep with --write."""
    with tempfile.TemporaryDirectory() as folder:
        text = table(Path(folder), lambda line: click.echo(line, err=True))
    click.echo(text)
    if write:
        committed.write(PAGE, text, "python -m benchmarks.heartbeat --write")


if __name__ == "__main__":
    main()
