# Bounds of the gradient of whole answers, by hand and on enumerated trees.

import math

import numpy as np
import pytest
from benchmarks.theory import trajectory
from benchmarks.theory.theorems.trajectory import (
    grpo_bias,
    rloo_bias,
    sequence_mis_bias,
    sequence_naive_bias,
    sequence_tis_bias,
    token_is_trajectory_bias,
)

from servanda.errors import EvidenceError
from servanda.theory.bounds.gradient import group_advantage_bound
from tests.theory.bounds import enumerated


def test_without_a_correction_the_least_of_three_bounds_holds():
    by_variation = sequence_naive_bias(0.001, 0.01, 4, 1.5, 2.0)
    by_chi2 = sequence_naive_bias(0.1, 0.01, 4, 1.5, 2.0)
    by_fisher = sequence_naive_bias(0.1, 0.01, 4, 1.5, 2.0, fisher=0.25)
    assert by_variation == pytest.approx(2 * 1.5 * 2.0 * 4 * 0.001)
    assert by_chi2 == pytest.approx(1.5 * 2.0 * 2 * 0.1)
    assert by_fisher == pytest.approx(1.5 * 0.1 * 0.5)


@pytest.mark.parametrize("fisher", [0.0, 1.0, math.inf])
def test_an_endless_chi2_leaves_the_variation(fisher):
    assert sequence_naive_bias(0.1, math.inf, 4, 1.0, 1.0, fisher) == pytest.approx(0.8)


@pytest.mark.parametrize("fisher", [0.0, 1.0, math.inf])
def test_equal_kernels_have_no_bias_whatever_factor_is_endless(fisher):
    assert sequence_naive_bias(0.0, 0.0, 100, 1.0, 1.0, fisher) == 0
    assert sequence_naive_bias(1.0, 0.0, 100, 1.0, 1.0, fisher) == 0
    assert sequence_tis_bias(1.0, 1.0, 5.0) == 0
    assert sequence_mis_bias(0.0, 1.0, 5.0) == 0
    assert token_is_trajectory_bias(0.0, 100, 1.0, 1.0, left=0.0) == 0
    assert grpo_bias(0.0, 8, 5.0) == 0
    assert rloo_bias(0.0, 1.0, 5.0) == 0
    assert sequence_naive_bias(0.0, 0.0, math.inf, 1.0, 1.0) == 0
    assert sequence_naive_bias(0.1, 0.01, 4, 0.0, math.inf) == 0
    assert sequence_tis_bias(1.0, 1.0, math.inf) == 0
    assert sequence_mis_bias(0.0, math.inf, 1.0) == 0
    assert token_is_trajectory_bias(0.0, math.inf, 1.0, math.inf, left=0.0) == 0
    assert grpo_bias(0.0, 8, math.inf) == 0
    assert rloo_bias(0.0, math.inf, 1.0) == 0


def test_the_bias_grows_as_the_length_and_not_as_its_square():
    """A drift of d at each step: TV grows as T d or so, and T x TV as T squared."""
    d = 1e-5
    T = np.array([100.0, 10_000.0])
    said = sequence_naive_bias(1.0, np.expm1(T * np.log1p(d**2)), T, 1.0, 1.0)
    assert said[1] / said[0] == pytest.approx(100, rel=1e-3)


@pytest.mark.parametrize(
    "bound",
    [
        lambda x: sequence_naive_bias(x, 4 * x**2, 8, 1.0, 1.0),
        lambda x: sequence_tis_bias(1 - x, 1.0, 8.0),
        lambda x: sequence_mis_bias(x, 1.0, 8.0),
        lambda x: token_is_trajectory_bias(x, 8, 1.0, 1.0, left=0.0),
        lambda x: grpo_bias(x, 8, 8.0, whole_group=True),
        lambda x: rloo_bias(x, 1.0, 8.0),
    ],
)
def test_more_drift_never_means_less_bias(bound):
    assert (np.diff(bound(np.linspace(0, 1, 101))) >= 0).all()


def test_capped_and_masked_weights_leave_the_mass_they_lose():
    assert sequence_tis_bias(0.9, 2.0, 3.0) == pytest.approx(0.6)
    assert sequence_tis_bias(1.02, 2.0, 3.0) == 0  # the sample mean of a weight may exceed 1
    assert sequence_mis_bias(0.1, 2.0, 3.0) == pytest.approx(0.6)


def test_token_weights_mend_one_of_the_steps():
    assert token_is_trajectory_bias(0.3, 1, 1.0, 1.0, 0.0) == 0  # there is no other step
    assert token_is_trajectory_bias(0.01, 11, 2.0, 3.0, 0.0) == pytest.approx(2 * 2 * 3 * 11 * 0.1)
    assert token_is_trajectory_bias(0.5, 11, 1.0, 1.0, 0.0) == 2 * 11  # the variation is at most 1
    assert token_is_trajectory_bias(0.0, 11, 2.0, 3.0, left=0.1) == pytest.approx(0.6)


def test_token_weights_can_bend_the_gradient_of_the_reward_more_than_none():
    rng = np.random.default_rng(3)
    ratios = []
    for wood in trajectory.woods(rng, 4000):
        made = wood.trees
        reward_NL = rng.uniform(-1.0, 1.0, made.infer_NL.shape)
        p_NL1, q_NL1 = made.train_NL[..., None], made.infer_NL[..., None]
        none_N, token_N = (
            np.linalg.norm(np.einsum("nl,nlt,nltj->nj", reward_NL, off, wood.score_NLTJ), axis=1)
            for off in ((q_NL1 - p_NL1) * made.live_LT, q_NL1 * made.weight_NLT - p_NL1)
        )
        if made.live_LT.shape[1] > 1:
            ratios += (token_N[none_N > 1e-9] / none_N[none_N > 1e-9]).tolist()
    assert np.mean(np.array(ratios) > 1) > 0.1
    assert np.median(ratios) < 0.9  # they help, on the whole


def test_a_group_bounds_its_advantage_and_a_whole_group_has_the_variation_of_all():
    A = group_advantage_bound(8)
    assert grpo_bias(0.01, 8, 3.0) == pytest.approx(2 * A * 3.0 * 0.01)
    assert grpo_bias(0.01, 8, 3.0, whole_group=True) == pytest.approx(2 * A * 3.0 * 0.08)
    assert grpo_bias(0.5, 8, 3.0, whole_group=True) == pytest.approx(2 * A * 3.0)
    assert grpo_bias(0.01, 8, 3.0, "population") > grpo_bias(0.01, 8, 3.0)


def test_a_baseline_of_the_others_centres_the_reward():
    assert rloo_bias(0.1, 0.5, 3.0) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sequence_naive_bias(1.2, 0.0, 4, 1.0, 1.0),
            "tv_seq is 1.2, outside of [0, 1]",
        ),
        (
            lambda: sequence_naive_bias(0.1, 0.0, 0, 1.0, 1.0),
            "tokens is 0, outside of [1, inf]",
        ),
        (
            lambda: grpo_bias(0.1, 1, 3.0),
            "group_size is 1, outside of [2, inf]\n  hint: one answer has no advantage",
        ),
        (
            lambda: grpo_bias(0.1, 2.5, 3.0),  # type: ignore[arg-type]
            "a group has 2.5 answers\n  hint: give a whole number of them",
        ),
        (lambda: sequence_mis_bias(-0.1, 1.0, 1.0), "mass_outside is -0.1, outside of [0, 1]"),
    ],
)
def test_what_no_proof_covers_is_refused(call, message):
    with pytest.raises(EvidenceError) as raised:
        call()
    enumerated.refused(raised, message)
