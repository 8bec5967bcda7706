# Checks of other projects: each number against one computed by hand, one token at a time.

import math

import numpy as np
import pytest
from benchmarks.experiment.guards import FIELD, measure, trend_fires

from servanda.errors import EvidenceError

# two sequences; the last place of the second is padding, with NaN in it
TRAIN = [[-0.5, -1.0, -2.0], [-0.1, -3.0, math.nan]]
INFER = [[-0.7, -1.0, -1.5], [-0.1, -7.0, 0.0]]
MASK = [[1, 1, 1], [1, 1, 0]]
D = [[0.2, 0.0, -0.5], [0.0, 4.0]]
FLAT = [d for row in D for d in row]
W = [math.exp(d) for d in FLAT]
CUT = [min(w, 2.0) for w in W]


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


BY_HAND = {
    "abs_d_mean": mean(map(abs, FLAT)),
    "abs_d_mean_by_sequence": mean([0.7 / 3, 4.0 / 2]),
    "abs_d_max": 4.0,
    "tme": mean(math.exp(abs(d)) for d in FLAT),
    "max_seq_mult_prob_error": (1 + math.exp(4.0)) / 2,
    "k3": mean(math.exp(d) - d - 1 for d in FLAT),
    "k1": -mean(FLAT),
    "probs_diff_mean": mean(
        abs(math.exp(p) - math.exp(q))
        for ps, qs, n in zip(TRAIN, INFER, (3, 2), strict=True)
        for p, q in zip(ps[:n], qs[:n], strict=True)
    ),
    "is_mean": mean(CUT),
    "is_std": math.sqrt(mean((w - mean(CUT)) ** 2 for w in CUT)),
    "ess": mean(CUT) ** 2 / mean(w * w for w in CUT),
    "chi2_token": mean(w * w for w in W) - 1,
    "seq_masked_share": 1 / 2,  # exp(-0.3) and exp(4)
}


@pytest.mark.parametrize("name", [*BY_HAND])
def test_a_statistic_is_what_its_project_writes(name):
    assert measure(TRAIN, INFER, MASK)[name] == pytest.approx(BY_HAND[name], rel=1e-12)


def test_every_number_that_a_check_reads_is_computed_here():
    assert {bar.reads for guard in FIELD.values() for bar in guard.bars} <= set(BY_HAND)


def test_no_check_fires_on_kernels_that_agree():
    same = measure(TRAIN, TRAIN, MASK)

    assert [name for name, guard in FIELD.items() if guard.fires([same] * 3)] == []


@pytest.mark.parametrize("name", [*FIELD])
def test_every_check_fires_when_the_engine_never_synced(name):
    """4.5 nats apart, as an engine with other weights is."""
    rng = np.random.default_rng(0)
    train, infer = -rng.exponential(6.0, (8, 20)), -rng.exponential(1.0, (8, 20))

    step = measure(train, infer, np.ones((8, 20)))

    assert FIELD[name].fires([step, step])


def test_a_threshold_is_crossed_and_not_met():
    quiet, loud = [{"abs_d_mean_by_sequence": x} for x in (0.1, 0.1000001)]

    assert FIELD["slime"].fires([quiet, loud, quiet, loud]) == [1, 3]


def test_twice_means_two_steps_in_a_row():
    steps = [{"abs_d_mean_by_sequence": x} for x in (0.8, 0.2, 0.8, 0.9, 0.2)]

    assert FIELD["drift-guard"].fires(steps) == [3]


def test_each_bar_of_verls_health_check_is_enough():
    well = {"is_mean": 1.0, "ess": 0.9, "is_std": 0.1, "k1": 0.0, "chi2_token": 0.0}
    ill = {"is_mean": 0.4, "ess": 0.2, "is_std": 1.1, "k1": -0.2, "chi2_token": 1.5}
    health = FIELD["verl-health"]

    assert health.fires([well]) == []
    assert all(health.fires([{**well, name: value}]) == [0] for name, value in ill.items())


def test_a_step_without_the_statistic_is_an_error_and_not_quiet():
    with pytest.raises(EvidenceError, match="step 1 has no k3"):
        FIELD["prime-rl"].fires([{"k3": 0.0}, {"k3": math.nan}])


def test_a_trend_compares_the_last_five_steps_with_the_first_five():
    means = [1.0] * 5 + [2.0] * 5 + [2.5]

    assert trend_fires(means) == [10]
    assert trend_fires(means[:9], factor=0.1) == []


@pytest.mark.parametrize(
    ("train", "mask", "says"),
    [
        ([[math.nan, -1.0]], [[1, 1]], "1 of 2 trained tokens have no finite logprob"),
        ([[-1.0, -1.0]], [[0, 0]], "no token of this step is trained"),
        ([[-1.0]], [[1, 1]], r"logp_train is \(1, 1\)"),
    ],
)
def test_a_missing_number_is_an_error_and_never_zero(train, mask, says):
    with pytest.raises(EvidenceError, match=says):
        measure(train, [[-1.0, -1.0]], mask)
