# The page of the experiment says what the records say, and goes red where they do.

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from benchmarks.experiment import bias, page, pictures, sections, svg
from benchmarks.experiment.drills import read_drills
from benchmarks.experiment.record import Run, name_of
from benchmarks.experiment.statistics import STATISTICS
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


def test_a_diagnosis_on_record_is_shown_in_todays_words():
    said = {drill.fault: sections.diagnosis(drill) for drill in read_drills()}

    assert said["healthy"] == "all 12 groups of weights are synced"
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


def test_step_0_is_compared_with_the_healthy_run_of_the_seed():
    table = sections.equal_at_start(RUNS)

    # everything is quiet at step 0, so every statistic agrees
    size = len(STATISTICS)
    assert f"| one MLP stale | {size} of {size} | 0.00000 |" in table
