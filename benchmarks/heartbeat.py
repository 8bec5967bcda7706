# Requests until a heartbeat detects a fault: python -m benchmarks.heartbeat
#
# Each fault is a real server (`servanda tools serve-kernel`), of whose answers only texts are read.
# Beside it, at the same number of requests and the same alpha, the two-sample test of Model
# Equality Testing (arXiv 2410.20247): MMD with a Hamming kernel over whole answers, whose
# permutations keep each prompt's answers together.  False alarms are simulated: answers of the
# reference itself, many lives of a heartbeat, judged after every answer.

from __future__ import annotations

import contextlib
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import click
import numpy as np

from benchmarks import committed
from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names, open_engine
from servanda.engines.base import Engine
from servanda.runner.compare.prompts import plain_texts
from servanda.runner.heartbeat.baseline import Baseline, plain
from servanda.runner.heartbeat.baseline_source import (
    RecordOptions,
    from_endpoint,
    from_kernel,
    prompt_ids,
)
from servanda.runner.heartbeat.beat import Beat
from servanda.runner.heartbeat.beat_state import TESTS, BeatState, Settings
from servanda.runner.heartbeat.endpoint import Ask, Endpoint
from servanda.runner.heartbeat.response_rank import BINS, SCORES, RankScorer
from servanda.theory.black_box.answer_classes import RATES, STRENGTHS, AnswerClasses
from servanda.theory.black_box.restarts import Restarts
from servanda.theory.sampling import Sampling
from servanda.theory.stats.bets import log_mean_exp
from servanda.traces.trace import Batch

PAGE = committed.ROOT / "docs" / "how-to" / "heartbeat.md"
MODEL = "transformers:models/tiny-lm"
HEALTHY = f"{MODEL}@float32"
ALPHA, TOLERANCE, BUDGET, EACH, SEEDS = 0.01, 0.02, 200, 8, (1, 2, 3)
PERMUTATIONS, COMPARED = 400, 64  # characters of an answer that MMD compares
NULL_RUNS, NULL_BEATS, NULL_ALPHA = 500, 25, 0.05
SYSTEM = "You are a careful assistant. Answer in short sentences.\n\n"


@dataclass(frozen=True)
class Fault:
    """A faulty endpoint: a kernel, and what is put before each prompt."""

    name: str
    kernel: str
    before: str = ""


FAULTS = (
    Fault("int4 weights", f"{MODEL}@bfloat16+int4_g32"),
    Fault("temperature 0.7", f"{HEALTHY},fault=undisclosed_temperature:0.7"),
    Fault("a system prompt", HEALTHY, SYSTEM),
    Fault("top-p 0.95", f"{HEALTHY},fault=undisclosed_top_p:0.95"),
    Fault("another rotary base", f"{HEALTHY},fault=wrong_rope_base:2.0"),
    Fault("bfloat16 weights", f"{MODEL}@bfloat16"),
    Fault("none", HEALTHY),
)


class CachedScorer(RankScorer):
    """The same draws of one request are made once for all faults."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._made: dict[tuple[Any, ...], list[str]] = {}

    def _texts(self, batch: Batch, sampling: Sampling, seed: int) -> list[str]:
        key = (batch.sequence_S, batch.prompts, batch.width, sampling, seed)
        if key not in self._made:
            self._made[key] = super()._texts(batch, sampling, seed)
        return self._made[key]


class Altered(Endpoint):
    """An endpoint that puts a text of its own before each prompt."""

    before = ""

    def ask(self, asked: Ask) -> str:
        return super().ask(
            Ask(self.before + asked.prompt, asked.width, asked.temperature, asked.top_p, asked.seed)
        )


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


def endpoint_at(url: str, before: str) -> Altered:
    endpoint = Altered(parse_kernel(url, engines=engine_names()))
    endpoint.before = before
    return endpoint


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
        letters = np.array([[*text[:COMPARED].ljust(COMPARED, "\0")] for text in (*a, *b)])
        same = (letters[:, None] == letters[None]).mean(axis=2)
        np.fill_diagonal(same, 0.0)

        def gap(order: np.ndarray, same: np.ndarray = same, n: int = len(a)) -> float:
            x, y = order[:n], order[n:]
            m = len(y)
            inside = same[np.ix_(x, x)].sum() / (n * (n - 1))
            inside += same[np.ix_(y, y)].sum() / (m * (m - 1))
            return float(inside - 2 * same[np.ix_(x, y)].mean())

        total += gap(np.arange(len(letters)))
        permuted += [gap(rng.permutation(len(letters))) for _ in range(PERMUTATIONS)]
    return bool((1 + (permuted >= total).sum()) / (1 + PERMUTATIONS) <= ALPHA)


def answers(
    engine: Engine, prompts: list[tuple[int, ...]], each: int, seed: int
) -> list[list[str]]:
    """`each` answers of a kernel to each prompt."""
    eos = set(engine.describe().eos)
    found = []
    for row, ids in enumerate(prompts):
        numbers = tuple(range(row * each, (row + 1) * each))
        drawn = engine.generate(Batch(numbers, (ids,) * each, 32), Sampling(), seed)
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


def table(say: Callable[[str], None]) -> str:
    """Every number, as the page shows it."""
    texts = list(dict.fromkeys(plain_texts(None)))
    healthy = parse_kernel(HEALTHY, engines=engine_names())
    exact = from_kernel(HEALTHY, healthy, texts, RecordOptions())
    engine = open_engine(healthy)
    ids = prompt_ids(engine, exact.prompts, False)
    scorer = CachedScorer(engine, healthy, exact, ids)
    each = max(2, BUDGET // len(ids))
    with served(HEALTHY) as url:
        how = RecordOptions(candidates=24, draws=48)
        drawn = from_endpoint(
            url, parse_kernel(url, engines=engine_names()), texts, how, True, lambda _: None
        )
    reference = [answers(engine, ids, each, 100 + seed) for seed in SEEDS]
    alarms = [false_alarms(exact, kind) for kind in (True, False)]
    say(f"false alarms: {alarms}")
    rows = []
    for fault in FAULTS:
        begun = time.perf_counter()
        with served(fault.kernel) as url:
            found = []
            for baseline, by in ((exact, scorer), (drawn, None)):
                endpoint = endpoint_at(url, fault.before)
                found.append([detected(endpoint, baseline, by, seed) for seed in SEEDS])
                say(f"{fault.name}: {shown(found[-1])}  {time.perf_counter() - begun:.0f} s")
                endpoint.close()
        faulty = open_engine(parse_kernel(fault.kernel, engines=engine_names()))
        before = prompt_ids(faulty, [fault.before + text for text in exact.prompts], False)
        rejected = 0
        for seed, ours in zip(SEEDS, reference, strict=True):
            rejected += mmd_rejects(ours, answers(faulty, before, each, 200 + seed), seed)
        faulty.close()
        row = (
            f"| {fault.name} | {shown(found[0])} | {shown(found[1])} | {rejected} of {len(SEEDS)} |"
        )
        say(f"{row}  {time.perf_counter() - begun:.0f} s")
        rows.append(row)
    engine.close()
    head = "| fault | reference: the float32 kernel | reference: the endpoint before | MMD |"
    return "\n".join(
        [
            f"Median number of requests until a change was detected at α = {ALPHA:g}, over "
            f"{len(SEEDS)} seeds, with the tests that detected it and the number of seeds; at most "
            f"{BUDGET} requests. Against the kernel, the fault is there from the first request on. "
            "MMD: number of seeds in which the fixed-sample test of Model Equality Testing rejects "
            f"with {each * len(ids)} answers of each side.",
            "",
            head,
            "|---|---|---|---|",
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
    text = table(lambda line: click.echo(line, err=True))
    click.echo(text)
    if write:
        committed.write(PAGE, text, "python -m benchmarks.heartbeat --write")


if __name__ == "__main__":
    main()
