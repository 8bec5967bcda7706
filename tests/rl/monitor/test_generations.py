# Several generations of one optimizer step: calls of `observe` with the same number of updates.

import json

import numpy as np
import pytest

from servanda.rl import Monitor
from servanda.rl.dumps.formats import open_dump
from servanda.rl.watch.monitor_state import read_state
from tests.rl.monitor.made import step

GENERATIONS = 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6  # updates before each
NUMBERS = [0, 1, 0, 1, 2, 0, 1, 0, 1, 0, 0, 0]


def batches(size=2):
    rng = np.random.default_rng(7)
    return [step(rng, size=size, width=64, tv=0.004) for _ in GENERATIONS]


def judged(found):
    """What is said of a step, without the numbers of the steps that it is judged on."""
    return [(c.clause, c.slice, c.outcome, c.value, c.n) for c in found.verdict.cells]


def test_generations_of_a_step_are_judged_together_as_steps_are():
    """Thin steps, which only their window decides: equal numbers must not begin it anew."""
    one, each = Monitor("trl"), Monitor("trl")

    within = [one.observe(*b, weights=w) for b, w in zip(batches(), GENERATIONS, strict=True)]
    alone = [each.observe(*b, weights=number) for number, b in enumerate(batches())]

    assert [found.generation for found in within] == NUMBERS
    assert [found.generation for found in alone] == [0] * len(NUMBERS)
    assert [*map(judged, within)] == [*map(judged, alone)]
    assert within[-1].outcome == "holds" and within[0].outcome == "inconclusive"


def test_a_restart_goes_on_and_repeats_a_step_from_its_first_generation(tmp_path):
    path = tmp_path / "monitor.jsonl"
    data = batches(size=8)
    before = Monitor("trl", state=path)
    for b, weights in zip(data[:5], GENERATIONS, strict=False):
        before.observe(*b, weights=weights)

    again = Monitor("trl", state=path)
    found = [again.observe(*b, weights=w) for b, w in zip(data[2:], GENERATIONS[2:], strict=True)]

    assert [step.generation for step in found] == NUMBERS[2:]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["generation"] for line in lines] == NUMBERS[:5] + NUMBERS[2:]
    watched = read_state(path)
    assert [step.again for step in watched] == [False] * 5 + [True] * 3 + [False] * 7
    straight = Monitor("trl")
    whole = [straight.observe(*b, weights=w) for b, w in zip(data, GENERATIONS, strict=True)]
    trends = [steps[-1].metrics["servanda/trend"] for steps in (found, whole)]
    assert trends[0] == pytest.approx(trends[1], rel=1e-5)  # a state file has six digits


def test_a_dump_keeps_the_sequences_of_every_generation(tmp_path):
    monitor = Monitor("trl", dump=tmp_path / "dump", sample=1.0)
    for b, weights in zip(batches(), GENERATIONS, strict=True):
        monitor.observe(*b, weights=weights, tokens=np.ones(b[2].shape, dtype=np.int64))

    read = open_dump(tmp_path / "dump")
    kept = {n: sum(len(part) for part in read.of([n]).read()) for n in read.steps}
    assert kept == {n: 2 * GENERATIONS.count(n) for n in sorted(set(GENERATIONS))}
