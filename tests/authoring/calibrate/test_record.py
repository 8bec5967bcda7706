# What rounding alone reads as, against kernels that are equal and whose record is rounded.

import math

import numpy as np
import pytest

from servanda.authoring.calibrate.limits import Resampled, closed_rounds, record_floor
from servanda.judgement.clauses.statistical import Certificate
from servanda.runner import run
from servanda.runner.finished_run import reread
from servanda.theory.divergence.precision import eta
from tests import kit

MORE = """\
  - {id: budget, metric: ratio_budget, aggregate: p90, at_most: 0.5}
  - {id: used, metric: ratio_budget, aggregate: mean, clip: 1, at_most: 0.5}
  - {id: weights, metric: weight_gap, at_most: 0.5}
  - {id: bias, metric: policy_gradient_bias, at_most: 1}
  - {id: reward, metric: reward_drift, at_most: 0.9}
  - {id: support, metric: support_mass, at_most: 0.5}
reward: {range: [0, 2]}
"""
GRADIENT = (
    "gradient: {advantage: 2, score_norm: 3, clip_range: [0.2, 0.3], ratio: bypass, loss: %s}"
)


def floors(folder, loss, capture):
    """Clause -> (the floor, what a million rounded tokens read as, in answers as measured)."""
    path, _ = kit.write(folder, q={"": kit.BASE}, limit=0.5, more=MORE, slices=GRADIENT % loss)
    verdict = run.check(path, run_dir=folder / "run", open=run.in_process)
    with reread(folder / "run", verdict) as found:
        rounds = closed_rounds(found.plan, verdict.key, found.rounds)["workload"]
    rng = np.random.default_rng(5)
    answers = [view.pair.infer.length_S for view in rounds.own]
    sums = [
        rng.uniform(-eta(capture), eta(capture), (4000, n))
        for n in np.concatenate(answers).tolist()[:200]
    ]
    made = {}
    for cell in found.plan.cells:
        if isinstance(cell.kind, Certificate):
            again = Resampled(cell, cell.kind, rounds, np.ones((1, rounds.groups)), 0.0)
            made[cell.clause.id] = record_floor(again, capture)
    return made, sums


@pytest.mark.parametrize("capture", ["bfloat16", "float32"])
def test_metrics_of_the_chain_have_the_floor_of_rounded_records(tmp_path, capture):
    floor, sums = floors(tmp_path, "token_mean", capture)
    error = eta(capture)

    assert floor["budget"] == pytest.approx(error / -math.log(0.8), rel=0.3)
    assert floor["used"] < floor["budget"]
    # of one token: twice the total variation, and the declared six times that
    assert floor["weights"] == pytest.approx(2 * error / 4, rel=0.02)
    assert floor["bias"] == pytest.approx(6 * floor["weights"])
    drift = np.mean([2 * np.maximum(-np.expm1(s.sum(axis=1)), 0).mean() for s in sums])
    assert floor["reward"] == pytest.approx(drift, rel=0.1)
    assert floor["support"] is None


@pytest.mark.slow
def test_the_gaps_of_an_answer_add_up_by_its_loss(tmp_path):
    by_answer, sums = floors(tmp_path / "sum", "sequence_sum", "float32")
    by_token, _ = floors(tmp_path / "mean", "token_mean", "float32")
    length = np.mean([s.shape[1] for s in sums])

    assert by_answer["weights"] == pytest.approx(length * by_token["weights"], rel=0.1)
