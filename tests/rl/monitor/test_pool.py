"""Thin steps are pooled: consecutive steps are judged together until they decide."""

import numpy as np
import pytest

from servanda.rl import Monitor
from tests.rl.monitor.made import step


def thin(rng, tv=0.004):
    """A step of about 80 tokens, of which the preset needs several times as many."""
    return step(rng, 4, 28, tv=tv)


def observed(monitor, rng, steps, tv=0.004):
    return [monitor.observe(*thin(rng, tv), weights=t) for t in steps]


def test_a_run_of_thin_steps_is_decided_again_and_again():
    found = observed(Monitor("trl"), np.random.default_rng(0), range(12))
    decided = [s for s in found if s.outcome == "holds"]
    assert len(decided) >= 2
    for one in decided:
        assert one.pool.tokens > one.tokens and one.pool.steps > 1
        assert one.verdict.key.weights == f"{one.pool.first}..{one.weights}"
    # windows are disjoint: each begins after the last that was decided
    ends = [s.weights for s in found if s.pool.after is not None]
    firsts = sorted({s.pool.first for s in found})
    assert firsts == [0, *(end + 1 for end in ends if end < 11)]
    (note,) = (n for n in found[0].notes if "judged together" in n)
    assert f"up to {found[0].pool.most} steps in a row" in note


def test_an_undecided_window_says_what_it_has_and_needs():
    first = observed(Monitor("trl"), np.random.default_rng(0), range(1))[0]
    assert first.outcome == "inconclusive"
    assert f"tokens decide, and this step has {first.tokens}; up to" in str(first)
    assert first.needs_tokens > first.tokens


def test_a_pooled_verdict_is_that_on_the_tokens_of_its_steps():
    """Against one step with all tokens of the window, judged by a monitor of its own."""
    rng = np.random.default_rng(3)
    parts = [thin(rng) for _ in range(3)]
    monitor = Monitor("trl")
    for t, part in enumerate(parts):
        pooled = monitor.observe(*part, weights=t, groups=[f"{t}.{b}" for b in range(4)])
    assert pooled.pool.first == 0 and pooled.pool.steps == 3
    alone = Monitor("trl").observe(
        *(np.concatenate(x) for x in zip(*parts, strict=True)), weights=0
    )
    enforced = [
        [(c.clause, c.value, c.interval, c.n) for c in s.verdict.cells if c.slice == "all"]
        for s in (pooled, alone)
    ]
    for own, other in zip(*enforced, strict=True):
        assert own[0] == other[0] and own[3] == other[3]
        assert own[1] == pytest.approx(other[1])
        if own[2] is not None:
            assert own[2] == pytest.approx(other[2])


def test_a_violation_is_found_in_the_pool():
    found = observed(Monitor("trl"), np.random.default_rng(1), range(6), tv=0.09)
    assert "violated" in {s.outcome for s in found}


def test_a_restart_keeps_the_windows(tmp_path):
    state, rng = tmp_path / "run.jsonl", np.random.default_rng(0)
    before = observed(Monitor("trl", state=state), rng, range(2))
    after = observed(Monitor("trl", state=state), rng, range(2, 4))
    assert after[0].pool.most == before[0].pool.most
    assert after[0].pool.first == 2  # the statistics of the open window are not kept


def test_steps_that_decide_alone_are_judged_alone():
    found = [
        m.observe(*step(np.random.default_rng(t), 32, 128), weights=t)
        for m in [Monitor("trl")]
        for t in range(3)
    ]
    assert [s.pool for s in found] == [None] * 3
    assert {s.outcome for s in found} == {"holds"}
