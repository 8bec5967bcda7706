# The page of the experiment says what the records say, and goes red where they do.

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from benchmarks.experiment import answers, bias, page, pictures, sections, summary, svg
from benchmarks.experiment.alarms import firings
from benchmarks.experiment.drills import Drilled, read_drills
from benchmarks.experiment.guards import FIELD
from benchmarks.experiment.record import Run, name_of, read_runs
from benchmarks.experiment.statistics import STATISTICS
from benchmarks.experiment.tables import SHORT
from scipy import stats

from tests.experiment.test_alarms import RUNS


@pytest.fixture(scope="module")
def written():
    return page.files()


def test_page_and_pictures_are_in_step_with_the_committed_records(written):
    behind = [p.name for p, text in written.items() if p.read_text(encoding="utf-8") != text]

    assert behind == [], "run python -m benchmarks.experiment.page"


def test_pictures_are_well_formed_and_small(written):
    drawn = {path: text for path, text in written.items() if path.suffix == ".svg"}

    for text in drawn.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert f'viewBox="0 0 {svg.WIDTH} ' in text
        assert len(text) < 200_000
    assert len(drawn) == 3


def test_the_lines_of_the_rewards_are_named_where_they_end(written):
    (text,) = (text for path, text in written.items() if path.name == "experiment_rewards.svg")

    names = re.findall(r">(preflight and monitor|monitor|TIS|MIS|no correction) (0\.\d\d)<", text)
    assert dict(names) == {
        "no correction": "0.20",
        "TIS": "0.50",
        "MIS": "0.45",
        "monitor": "0.50",
        "preflight and monitor": "0.99",
    }


def test_a_diagnosis_on_record_is_shown_in_todays_words():
    said = {drill.fault: sections.diagnosis(drill) for drill in read_drills()}

    assert said["healthy"] == "every trained weight reaches the engine: all 12 groups are synced"
    assert said["one_mlp"].endswith("never reaches the engine (1 of 12 groups: layers.1.mlp)")
    assert "(1 sync later) (12 of 12 groups: " in said["late"]
    assert said["scaled"].startswith("weights reach the engine multiplied by a factor: mlp.")
    assert said["wrong_cast"] == "weights lose precision on their way to the engine"


def evaluated(case, arm, seed, reward, **more):
    rewards = {"step": [0, 10], "trained": [0.4, reward], "held_out": [0.5, 0.5]}
    return Run(
        name_of(case, "bfloat16", arm, seed),
        {"fault": case, "engine": "bfloat16", "arm": arm, "seed": seed, "steps": 10},
        evaluations=rewards,
        **more,
    )


def test_arms_are_compared_on_the_seeds_that_both_have():
    runs = [
        evaluated("healthy", "none", 0, 0.5),
        evaluated("healthy", "none", 1, 0.7),
        evaluated("healthy", "tis", 1, 0.75),
        evaluated("healthy", "tis", 2, 0.0),
    ]

    assert "| healthy | +0.05 | not run | not run | not run |" in sections.differences(
        runs, "trained"
    )
    assert "| healthy | 0.60 [-0.67, 1.87] | 0.38" in sections.reward_table(runs, "trained")


def test_the_answers_count_the_faults_that_a_check_finds_on_every_seed():
    said = summary.answers(RUNS, firings(RUNS), [])

    # one_mlp is found on two of three seeds only; the monitor was run on one of them
    assert "of 2 faults, the checks find on every seed: " in said
    assert "preflight sync test 1, " in said
    assert "monitor 1, best threshold of another project 1 (among" in said


def test_the_answers_name_the_case_that_costs_most():
    runs = [
        evaluated(case, arm, 0, reward)
        for case, rewards in {
            "healthy": (1.0, 1.0),
            "one_mlp": (0.75, 0.8),
            "never_synced": (0.25, 0.5),
        }.items()
        for arm, reward in zip(("none", "tis"), rewards, strict=True)
    ]

    said = summary.answers(runs, firings(RUNS), [])

    assert 'the case "never synced" ends at a reward of 0.25 instead of 1.00' in said
    assert "in the same case the other arms end at: TIS 0.50." in said
    assert "**Bound**: 0 of 0 computed biases" in said


def at(step, size, bound):
    """A checkpoint, by weighting the same but for what is left of the bias."""
    names = {"none": 1.0, "tis": 0.1, "mis": 0.2}
    return {
        "step": step,
        "signal": 0.5,
        "logit_bias": {name: size * share for name, share in names.items()},
        "logit_bound": {name: bound * share for name, share in names.items()},
        "parameter_bias": {name: [10 * size * share, 0.0] for name, share in names.items()},
        "parameter_bound": {name: 100 * bound * share for name, share in names.items()},
    }


def test_a_bias_above_its_bound_is_said_in_bold():
    kept = evaluated("healthy", "none", 0, 0.5, checkpoints=[at(0, 0.1, 0.4), at(10, 0.2, 0.4)])
    kept = replace(kept, steps={"step": [], "seconds": []})
    broken = replace(kept, checkpoints=[at(0, 0.5, 0.4)])

    told = bias.crossed([kept], pictures.points_of([kept]))
    assert told.startswith("No bias is above its bound.")
    assert "0 of 6 biases are above A × G × D, and the largest ratio is 0.05" in told
    told = bias.crossed([broken], pictures.points_of([broken]))
    assert told.startswith("**3 are above their bound.**")


def test_the_bias_is_told_as_a_share_of_the_signal():
    kept = evaluated("healthy", "none", 0, 0.5, checkpoints=[at(0, 0.1, 0.4), at(10, 0.2, 0.4)])

    assert "| healthy | 10 | 0.40 | 0.04 | 0.08 |" in bias.bias_table([kept])


@pytest.mark.parametrize("xs", [[1.0, 2.0, 3.0, 10.0], [3.0, 1.0, 1.0, 2.0], [4.0, 3.0, 3.0, 3.0]])
def test_a_rank_correlation_is_spearmans(xs):
    ys = [1.0, 5.0, 2.0, 9.0]

    assert bias.rank_correlation(xs, ys) == pytest.approx(stats.spearmanr(xs, ys)[0])


def test_what_the_table_says_is_said_in_words():
    told = firings(RUNS)

    said = sections.noticed(told)

    # one healthy run is loud at its last step: all checks fire but the one that needs two in a row
    assert "- **never synced**: 1 of 1 thresholds fire on every seed; " in said
    assert "the monitor fires at step 5, the preflight test fires before the first step." in said
    assert sections.sharp(told) == (
        "No published threshold fires on every broken run without also firing on a healthy one."
    )
    loud = firings([run for run in RUNS if run.settings["seed"] == 0])
    assert sections.sharp(loud).startswith(
        "12 published thresholds fire on every broken run and on no healthy one: slime (mean |d|"
    )


def test_step_0_is_compared_with_the_healthy_run_of_the_seed():
    table = sections.equal_at_start(RUNS)

    # everything is quiet at step 0, so every statistic agrees
    size = len(STATISTICS)
    assert f"| one MLP stale | {size} of {size} | 0.00000 |" in table


def test_thresholds_are_read_on_the_tokens_of_the_preflight_test():
    one = Drilled("healthy", "holds", "", "", 0.02, 0.04, 0.1, [], 13, 640, 6.0, 0.1, True)
    broken = replace(one, fault="one_mlp", outcome="violated", poison=2.2)

    told = sections.randomised([one, broken])

    assert "for 0 of 1 broken syncs before the weights are randomised, and for 1 afterwards" in told
    assert "a healthy sync then has mean |d| 0.04" in told


def test_an_arm_that_was_not_run_is_marked_and_not_counted_as_a_run():
    ran = [evaluated("healthy", "none", seed, 0.5 + seed / 10, seconds=3600.0) for seed in (0, 1)]
    same = [
        replace(run, name=name_of("healthy", "bfloat16", "monitor", seed), same_as=run.name)
        for seed, run in enumerate(ran)
    ]
    same = [replace(run, settings={**run.settings, "arm": "monitor"}, seconds=None) for run in same]
    own = [evaluated("healthy", arm, seed, 0.6) for arm in ("tis", "mis") for seed in (0, 1)]

    runs = [*ran, *same, *own]

    assert sections.hours(runs).startswith("6 runs took 2.0 hours; 2 more records are read from")
    assert "| 0.60 [0.60, 0.60] | 0.60 [0.60, 0.60] | 0.55 [-0.09, 1.19] = | not run |" in (
        sections.reward_table(runs, "trained")
    )
    assert "+0.00 [+0.00, +0.00] = |" in sections.differences(runs, "trained")
    assert "1 cells are 0 by construction" in sections.helped(runs)


@pytest.mark.parametrize(("loud", "says"), [(4, "would be *holds*"), (12, "would be *violated*")])
def test_a_monitor_that_is_quiet_where_the_field_is_not_is_explained_by_what_it_measured(
    loud, says
):
    """With most steps within the limit, too few tokens are not the reason; the mean decides."""
    values = [0.04] * loud + [0.01] * (12 - loud)
    cells = [
        {
            "outcome": "inconclusive",
            "cells": [["gradient", "all", "inconclusive", v, 0, 1, 700], ["gradient", "depth<6"]],
        }
        for v in values
    ]
    quiet = next(r for r in RUNS if r.settings["fault"] == "healthy" and r.monitor)
    fires = next(r for r in RUNS if r.settings["fault"] == "never_synced")
    runs = [quiet, replace(fires, monitor=cells)]

    told = answers.slower(runs, firings(runs))

    assert f"above the limit of 0.025 on {loud} of 12 steps." in told
    assert f"consecutive steps is {'0.0200, below' if loud == 4 else '0.0400, above'}" in told
    assert says in told


def test_the_short_table_has_the_sharpest_row_of_the_field():
    """No check that is quiet on healthy runs fires in a case that the short table leaves out."""
    told = firings(read_runs())
    quiet = {name: row for name, row in told.items() if not sections.fires_on_healthy(row)}
    seen = {
        name: {case for case, of in row.items() if of and of.runs} for name, row in quiet.items()
    }
    shown = set().union(*(seen[name] for name in SHORT if name in seen and name in FIELD))

    for name in FIELD:
        assert seen.get(name, set()) <= shown, f"{name} fires where the table has nothing"
