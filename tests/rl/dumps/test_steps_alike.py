# `check DIR` and `watch` say the same of every step, whatever is wrong with one.

import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.watch import dump
from tests.rl.dumps import made


def exit_codes(folder):
    """Of `check DIR`, and of `watch DIR --once`."""
    commands = (["check", str(folder)], ["watch", str(folder), "--once"])
    return tuple(CliRunner().invoke(main, command).exit_code for command in commands)


def by_step(folder):
    """Step -> outcome, as a check and as a watch has it."""
    checked = judge_dump(DumpOptions(folder)).verdict.breakdown.steps
    watched = dump.DumpSource(dump.WatchOptions(folder)).poll(final=True)
    return {r.step: r.outcome for r in checked}, {s.step: s.outcome for s in watched}


def moved(rng, r, chosen_S, moves):
    """Log ratios of some sequences are one of these."""
    chosen_N = np.repeat(chosen_S, r.length_S) & r.mask_N
    train_N = r.logp_train_N.copy()
    train_N[chosen_N] = r.logp_infer_N[chosen_N] + rng.choice(moves, chosen_N.sum())
    return replace(r, logp_train_N=np.minimum(train_N, -1e-6))


def healthy(_, r):
    return r


def a_filtered_step(rng, r):
    if r.step != 7:
        return r
    gone_S = np.arange(len(r)) % 2 == 0
    return made.without(moved(rng, r, gone_S, [-0.3, 0.22]), gone_S)


def a_filtered_slice(rng, r):
    """Three of four sequences of env b are beyond the limit, and were removed."""
    s = np.arange(len(r))
    b_S = s % 4 == 0
    gone_S = b_S & ((s // 4) % 4 != 0)
    found = made.without(moved(rng, r, gone_S, [-0.11, 0.095]), gone_S)
    return replace(found, labels={"env": tuple("b" if b else "a" for b in b_S)})


def a_copied_step(rng, r):
    return replace(r, logp_train_N=r.logp_infer_N.copy()) if r.step == 3 else r


def a_step_of_zeros(rng, r):
    if r.step != 5:
        return r
    zero_N = r.mask_N & (rng.random(len(r.mask_N)) < 0.3)
    return replace(r, logp_infer_N=np.where(zero_N, 0.0, r.logp_infer_N))


def a_step_beyond(rng, r):
    return moved(rng, r, np.arange(len(r)) >= 0, [-0.3, 0.22]) if r.step == 9 else r


@pytest.mark.parametrize(
    ("change", "how", "codes", "odd"),
    [
        (healthy, {"turn_tokens": 64}, (0, 0), {}),
        (a_filtered_step, {"n": 48, "turn_tokens": 64}, (3, 0), {7: "inconclusive"}),
        (a_filtered_slice, {"n": 96}, (3, 3), dict.fromkeys(range(7, 13), "inconclusive")),
        pytest.param(
            a_copied_step,
            {"n": 8, "turn_tokens": 48, "steps": range(1, 121)},
            (4, 4),
            {3: "error"},
            marks=pytest.mark.slow,
        ),
        (a_step_of_zeros, {"turn_tokens": 64}, (4, 4), {5: "error"}),
        (a_step_beyond, {"turn_tokens": 64}, (1, 1), {9: "violated"}),
    ],
    ids=["healthy", "filtered step", "filtered slice", "copied", "zeros", "beyond"],
)
def test_a_step_is_judged_alike_by_check_and_by_watch(tmp_path, change, how, codes, odd):
    made.each(tmp_path, change, **how)

    checked, watched = by_step(tmp_path)

    assert checked == watched
    assert {step: checked[step] for step in odd} == odd
    assert exit_codes(tmp_path) == codes


def test_a_step_that_was_written_again_is_not_sound_for_a_watch_either(tmp_path):
    made.each(tmp_path, healthy, steps=range(1, 7), turn_tokens=64)
    later = made.each(tmp_path / "later", healthy, steps=range(4, 5), turn_tokens=64)
    shutil.copy(later / "step_000004.rank0.parquet", tmp_path / "step_000004.rank0.parquet")
    shutil.rmtree(later)

    assert exit_codes(tmp_path) == (4, 4)
    seen = [*dump.DumpSource(dump.WatchOptions(tmp_path)).poll(final=True)]
    assert [s.step for s in seen if s.outcome == "error"] == [4]
    assert "step 4 as step 1" in seen[3].why
