# Promises of the bound chain, judged from sampled tokens, against enumeration of the tables.

import numpy as np
import pytest

from servanda import run
from servanda.bounds import PSI
from tests import kit

Q = {"": kit.moved(kit.BASE, 0.06)}
DECLARED = "reward: {range: [-1, 1]}\ngradient: {weighting: {tis: 1.1}}"
PROMPTS = ((0,), (1,), (2,))
WIDTH = 4


def judged(tmp_path, metric, limit, claim, **more):
    clause = f"  - {{id: c, metric: {metric}, at_most: {limit}, slices: all}}"
    path, pair = kit.write(
        tmp_path, q=Q, limit=0.3, more=clause, slices=DECLARED, width=WIDTH, claim=claim, **more
    )
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (cell,) = (c for c in verdict.cells if c.clause == "c")
    return cell, pair


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_reward_drift_is_the_range_times_the_variation_of_whole_answers(tmp_path, claim):
    cell, pair = judged(tmp_path, "reward_drift", 0.5, claim)
    truth = 2 * np.mean([pair.sequence_tv(prompt, WIDTH) for prompt in PROMPTS])
    assert cell.outcome == "holds"
    assert cell.kind == "certificate"
    assert cell.interval[0] < truth < cell.interval[1]
    assert "reward_range" in cell.assumptions
    assert ("independent" in cell.assumptions) == (claim == "population")
    assert cell.units == ("prompt groups" if claim == "population" else "sequences")


def test_reward_drift_beyond_its_limit_is_violated(tmp_path):
    cell, pair = judged(tmp_path, "reward_drift", 0.1, "population")
    assert 2 * pair.sequence_tv(PROMPTS[0], WIDTH) > 0.1
    assert cell.outcome == "violated"


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_the_weight_gap_is_what_the_declared_weighting_leaves(tmp_path, claim):
    cell, pair = judged(tmp_path, "weight_gap", 0.3, claim)
    truth = np.mean([pair.weight_gap(p, WIDTH, PSI["tis"](1.1).weight) for p in PROMPTS])
    assert truth > 0
    assert cell.outcome == "holds"
    assert cell.interval[0] < truth < cell.interval[1]
