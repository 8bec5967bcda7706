# A step of the monitor with the conclusion about its engine: outcome, metrics, state, watch.

import json
import math

import numpy as np
import pytest

from servanda.rl import Monitor, read_state
from servanda.rl.watch.loop import step_line
from tests.rl.follow.made import HELD, Walk
from tests.rl.monitor.made import step as made
from tests.rl.watch.made import Out, following


def judged(fault, state):
    """The steps of a monitor whose tokens hold, with an engine of a fault."""
    walk, monitor = Walk(looks=8), Monitor("verl-sync", state=state)
    tokens = made(np.random.default_rng(0), size=64)
    found = walk.follow(walk.engine(HELD[fault]))
    return [monitor.observe(*tokens, weights=k, follow=f) for k, f in enumerate(found)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    return {
        name: (judged(fault, folder / f"{name}.jsonl"), folder / f"{name}.jsonl")
        for name, fault in (("healthy", ""), ("broken", "never_synced"))
    }


def test_an_engine_that_does_not_follow_makes_a_step_violated_with_its_cause(runs):
    steps, _ = runs["broken"]

    assert steps[0].outcome == "holds" and steps[0].follow.outcome == "inconclusive"
    assert (steps[-1].outcome, steps[-1].exit_code) == ("violated", 1)
    assert steps[-1].verdict.outcome == "holds"
    assert steps[-1].cause == "no sync has reached the engine, while the trainer has changed"
    assert steps[-1].metrics["servanda/exit_code"] == 1.0
    assert steps[-1].metrics["servanda/follow/slope"] == 0.0
    assert "\nfollow   ✗ version 7: no sync has reached the engine" in str(steps[-1])


def test_an_engine_that_follows_or_is_undecided_leaves_the_outcome_as_it_is(runs):
    steps, _ = runs["healthy"]

    assert {step.outcome for step in steps} == {"holds"}
    assert {step.follow.outcome for step in steps} == {"inconclusive", "holds"}
    assert steps[-1].metrics["servanda/follow/slope"] == pytest.approx(1, abs=0.05)
    assert not any("follow" in name for name in judged_alone().metrics)


def judged_alone():
    tokens = made(np.random.default_rng(0), size=64)
    return Monitor("verl-sync").observe(*tokens, weights=0)


def test_the_state_file_has_it_and_watch_shows_it_in_the_line_of_the_step(runs):
    _, healthy = runs["healthy"]
    _, broken = runs["broken"]

    line = json.loads(broken.read_text().splitlines()[-1])["follow"]
    assert (line["outcome"], line["cause"], line["slope"]) == ("violated", "never_synced", 0.0)
    good, bad = read_state(healthy)[-1], read_state(broken)[-1]
    assert "  follow ✓ 1.0" in step_line(good)
    assert step_line(bad).endswith(
        "follow ✗ 0.00 [0.00, 0.00]: no sync has reached the engine, while the trainer has changed"
    )
    first = read_state(healthy)[0]
    assert "follow ? the trainer's scores have not changed yet" in step_line(first)


def test_watch_alerts_with_the_cause_and_blames_no_cell(runs):
    _, broken = runs["broken"]
    out = Out()
    watch = following(broken, out, once=True)
    watch.run()

    alert = next(line for line in out.lines if "violated" in line and line.lstrip()[0] == "✗")
    assert "limit" not in alert and watch.state.stop_why.startswith("the engine does not follow")
    assert math.isfinite(watch.state.stop)
