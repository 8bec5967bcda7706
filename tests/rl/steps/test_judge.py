"""The judge of a run: what one step does not decide is judged on the last few together."""

import math

import numpy as np
import pytest

from servanda.rl import Monitor
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.steps.judge import WHOLE_PART
from servanda.theory.stats.alpha import log_price, shared, step_alpha
from tests.rl.dumps import made as dumps
from tests.rl.monitor.made import step


def thin(rng, tv=0.004):
    """A step of about 80 tokens, of which the preset needs several times as many."""
    return step(rng, 4, 28, tv=tv)


def observed(monitor, rng, steps, tv=0.004):
    return [monitor.observe(*thin(rng, tv), weights=t) for t in steps]


def whole(found):
    return next(c for c in found.verdict.cells if c.slice == "all" and c.enforced)


def test_thin_steps_of_a_run_hold_together_from_some_step_on():
    found = observed(Monitor("trl"), np.random.default_rng(0), range(12))
    outcomes = [s.outcome for s in found]
    first = outcomes.index("holds")
    assert set(outcomes[:first]) == {"inconclusive"} and set(outcomes[first:]) == {"holds"}
    for one in found[first:]:
        assert whole(one).steps == (0, one.weights)
        assert one.verdict.tokens > one.tokens
        assert one.verdict.key.weights == f"0..{one.weights}"
    (note,) = (n for n in found[0].notes if "steps together" in n)
    assert f"a step has about {found[0].tokens} tokens" in note


def test_an_undecided_step_says_what_it_has_and_needs():
    first, second = observed(Monitor("trl"), np.random.default_rng(0), range(2))
    assert first.outcome == second.outcome == "inconclusive"
    assert f"to be decided, and this one has {first.tokens}" in str(first)
    assert f"and steps 0 to 1 together have {first.tokens + second.tokens}" in str(second)
    assert first.needs_tokens > first.tokens


def test_a_verdict_on_several_steps_is_that_on_all_their_tokens():
    """Against one step with all tokens of the window, judged by a monitor of its own."""
    rng = np.random.default_rng(3)
    parts = [thin(rng) for _ in range(3)]
    monitor = Monitor("trl")
    for t, part in enumerate(parts):
        pooled = monitor.observe(*part, weights=t, groups=[f"{t}.{b}" for b in range(4)])
    alone = Monitor("trl").observe(
        *(np.concatenate(x) for x in zip(*parts, strict=True)), weights=0
    )
    own, other = whole(pooled), whole(alone)
    assert own.steps == (0, 2) and other.steps is None
    assert own.n == other.n and own.value == pytest.approx(other.value)
    assert own.interval == pytest.approx(other.interval)


def test_a_violation_is_found_together():
    found = observed(Monitor("trl"), np.random.default_rng(1), range(6), tv=0.04)
    assert "violated" in {s.outcome for s in found}
    assert found[0].outcome != "violated"


def test_a_window_that_does_not_decide_grows():
    """At .8 of the limit ten times as many tokens are needed as of a good pair."""
    found = observed(Monitor("trl"), np.random.default_rng(5), range(80), tv=0.02)
    spans = [1 + b - a for a, b in filter(None, (whole(s).steps for s in found))]
    assert max(spans) >= 24 and found[-1].outcome == "holds"


def test_a_restart_continues_the_series_and_begins_a_window(tmp_path):
    state, rng = tmp_path / "run.jsonl", np.random.default_rng(0)
    before = observed(Monitor("trl", state=state), rng, range(3))
    monitor = Monitor("trl", state=state)
    after = observed(monitor, rng, range(3, 5))
    first = (1, 1, 1, 4, 4)  # of each window, at whose price it is judged
    parts = [one.verdict.part for one in (*before, *after)]
    assert parts == [step_alpha(1 - WHOLE_PART, number) for number in first]
    assert whole(after[1]).steps == (3, 4)


def test_a_run_that_went_back_begins_anew():
    """What began before has spent its share of the budget on the steps that are repeated."""
    rng = np.random.default_rng(0)
    found = observed(Monitor("trl"), rng, (0, 1, 2, 1, 2))
    assert [whole(s).steps for s in found] == [None, (0, 1), (0, 2), None, (1, 2)]
    assert found[3].verdict.tokens == found[3].tokens


def test_a_repaired_run_is_not_violated_by_the_steps_before():
    rng = np.random.default_rng(7)
    monitor = Monitor("trl")
    found = observed(monitor, rng, range(3), tv=0.3) + observed(monitor, rng, range(3, 9), tv=0.001)
    assert [s.outcome for s in found[:3]] == ["violated"] * 3
    assert "violated" not in {s.outcome for s in found[3:]}


def test_a_step_that_is_an_error_is_in_no_window():
    rng = np.random.default_rng(0)
    monitor = Monitor("trl")
    first = monitor.observe(*thin(rng), weights=0)
    train, _, mask = thin(rng)
    broken = monitor.observe(train, train.copy(), mask, weights=1)
    last = monitor.observe(*thin(rng), weights=2)
    assert (broken.outcome, broken.exit_code) == ("error", 4)
    assert whole(last).steps == (0, 2) and last.verdict.tokens == first.tokens + last.tokens


def test_steps_that_decide_alone_are_judged_alone():
    monitor = Monitor("trl")
    for t in range(3):
        found = monitor.observe(*step(np.random.default_rng(t), 64, 256), weights=t)
        assert {c.steps for c in found.verdict.cells} == {None} and found.outcome == "holds"


# mean TV of steps that do not decide it alone; the limit is 0.025
GOOD, NEAR, POOR = 0.024, 0.0255, 0.0265


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "tv"),
    [
        (range(16), 16 * [POOR]),
        (range(16), 3 * [GOOD] + 5 * [POOR] + 2 * [GOOD] + 6 * [POOR]),
        (range(16), 10 * [NEAR] + 6 * [POOR]),
        ((*range(4), *range(1, 4), *range(2, 11)), 16 * [POOR]),  # it goes back
    ],
)
def test_a_series_of_steps_has_the_price_of_its_first(weights, tv):
    """The oracle judges all tokens of a series as one step, by a monitor that saw no other."""
    monitor, series, number, evidence = Monitor("trl"), [], 0, 0.0
    found, expected = [], []
    for n, (step_, mean) in enumerate(zip(weights, tv, strict=True), 1):
        part = step(np.random.default_rng(n), 24, 64, tv=mean)
        cell = whole(monitor.observe(*part, weights=step_))
        found.append((cell.outcome == "violated", cell.steps))
        if series and step_ <= series[-1][0]:
            series.clear()
        if not series or evidence <= math.log(step_alpha(1, n)):  # the last alone has more
            series.clear()
            number = n
        series.append((step_, part))
        pooled = [np.concatenate(x) for x in zip(*(of for _, of in series), strict=True)]
        alone = whole(Monitor("trl").observe(*pooled, weights=0))
        evidence = alone.e_violated + math.log(step_alpha(1, number))
        plan = monitor._plan
        red = evidence >= log_price(shared(plan.alpha * (1 - WHOLE_PART), plan.price_cells))
        span = (series[0][0], step_) if red and len(series) > 1 else None
        expected.append((red, span))
        if red:
            series.clear()
    assert found == expected
    assert any(red for red, _ in found)


@pytest.mark.parametrize(("steps", "part"), [(1, 1.0), (3, WHOLE_PART)])
def test_the_whole_of_a_dump_has_what_its_steps_leave(steps, part, tmp_path):
    found = judge_dump(DumpOptions(dumps.write(tmp_path, steps=range(steps), n=8)))
    assert found.verdict.part == part
