# The gradient that a trainer applies, third kernels and conversations, by definition and by hand.

import itertools
import math

import numpy as np
import pytest
from benchmarks.theory.epochs import clipped_slope

from servanda.errors import EvidenceError
from servanda.theory.bounds.gradient import (
    LOGIT_SCORE_NORM,
    clipped_gradient_bias,
    gradient_direction,
    gradient_norm_at_least,
    kl_penalty_bias,
    policy_gradient_bias,
)
from servanda.theory.bounds.importance_weights import PSI
from servanda.theory.bounds.sequence import conversation_tv_from_token_tv, sequence_estimators
from servanda.theory.bounds.third_kernel import tv_with_own_routes, weight_gap_with_lag
from tests.theory.bounds import enumerated

LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def softmax(logits_V):
    mass_V = np.exp(logits_V - logits_V.max())
    return mass_V / mass_V.sum()


def loss(logits_V, train_V, of_V, advantage_V):
    """PPO's objective with a dual clip, written as papers write it, over given masses of tokens."""
    total = 0.0
    for p, mass, r, a in zip(train_V, of_V, softmax(logits_V) / train_V, advantage_V, strict=True):
        surrogate = min(r * a, min(max(r, 1 - LOW), 1 + HIGH) * a)
        total += mass * (surrogate if a >= 0 else max(surrogate, DUAL * a)) * (p > 0)
    return total


def slope(logits_V, *rest):
    """The gradient of the loss in logits, by central differences."""
    step = 1e-6
    moves = step * np.eye(len(logits_V))
    return np.array([loss(logits_V + m, *rest) - loss(logits_V - m, *rest) for m in moves]) / (
        2 * step
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_gradient_of_the_clipped_loss_differs_by_no_more_than_its_bound(seed):
    rng = np.random.default_rng(seed)
    train_V, infer_V = softmax(rng.normal(size=4)), softmax(2 * rng.normal(size=4))
    new, advantage_V = np.log(train_V) + rng.normal(size=4), 2 * rng.uniform(-1, 1, 4)
    psi = (PSI["tis"](1.5), PSI["naive"]())[seed % 2]
    weighed_V = infer_V * psi.weight(train_V / infer_V)

    biased_V, exact_V = (slope(new, train_V, of_V, advantage_V) for of_V in (weighed_V, train_V))

    r_V, score_VV = softmax(new) / train_V, np.eye(4) - softmax(new)
    slopes = [clipped_slope(r, a, LOW, HIGH, DUAL) for r, a in zip(r_V, advantage_V, strict=True)]
    assert biased_V == pytest.approx((weighed_V * r_V * slopes) @ score_VV, abs=1e-6)
    gap = np.abs(train_V - weighed_V).sum()
    bound = clipped_gradient_bias(gap, 2.0, LOGIT_SCORE_NORM, HIGH, DUAL)
    assert np.linalg.norm(biased_V - exact_V) <= bound


def test_a_penalty_that_is_not_clipped_exceeds_any_bound():
    """Two tokens that train draws alike; the reference hardly draws either."""
    train_V, infer_V, score_V = np.array([0.5, 0.5]), np.array([0.6, 0.4]), np.array([1.0, -1.0])
    for nats in (10.0, 100.0, 1000.0):
        advantage_V = np.full(2, -1.0 - 0.1 * nats)  # -1, and 0.1 log(policy / reference)
        exact = abs(((train_V - infer_V) * advantage_V) @ score_V)
        assert exact == pytest.approx(kl_penalty_bias(0.2, 1.0, 1.0, 0.1, nats))
        assert exact > nats / 10 * policy_gradient_bias(0.2, 1.0, 1.0)
    assert kl_penalty_bias(0.2, 1.0, 1.0, 0.1, 10.0, 5) == pytest.approx(0.2 * 6.0)


@pytest.mark.parametrize("bias", [0.0, 0.3, 0.999, 1.0])
def test_the_worst_direction_is_the_tangent(bias):
    angle_A = np.linspace(0, 2 * math.pi, 1_000_001)
    off_AJ = bias * np.stack([np.cos(angle_A), np.sin(angle_A)], axis=1)
    biased_AJ = np.array([1.0, 0.0]) + off_AJ
    norm_A = np.linalg.norm(biased_AJ, axis=1)
    cosine_A = biased_AJ[norm_A > 1e-5, 0] / norm_A[norm_A > 1e-5]
    assert gradient_direction(bias, 1.0) == pytest.approx(cosine_A.min(), abs=1e-4)
    assert gradient_direction(bias + 1.0, 1.0) == -1.0 or bias == 0.0


def test_the_norm_of_a_mean_is_lowered_by_bernsteins_reach():
    norm, largest, n, planned, alpha = 0.5, 2.0, 4000, 5000, 0.01
    r = n * (norm - gradient_norm_at_least(norm, largest, n, planned, alpha))
    price = math.log(2 / alpha)
    assert r**2 == pytest.approx(2 * price * (planned * largest**2 + 2 * largest * r / 3))
    assert gradient_norm_at_least(0.01, largest, n, planned, alpha) == 0.0


def test_an_environment_that_answers_each_kernel_otherwise_is_in_no_ratio():
    """One token that both kernels sample alike, then a tool that times out for one of them."""
    answers = [*itertools.product((0, 1), repeat=2)]
    tool = {"train": 0.1, "infer": 0.4}
    law = {k: np.array([0.5 * (x if t else 1 - x) for _, t in answers]) for k, x in tool.items()}
    found = sequence_estimators([math.log(0.5 / 0.5)] * 4, [1] * 4)
    assert law["infer"] @ found.exact == 0.0
    assert np.abs(law["train"] - law["infer"]).sum() / 2 == pytest.approx(0.3)


def test_the_gap_of_a_mask_jumps_however_short_the_lag():
    infer_V, psi = np.array([0.5, 0.5]), PSI["mis"]((0.0, 1.0))
    for lag in (1e-3, 1e-6, 1e-9):
        new_V = infer_V + lag * np.array([1.0, -1.0])
        gap = np.abs(new_V - infer_V * psi.weight(new_V / infer_V)).sum()
        assert gap > 0.5  # and none without the lag


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clipped_gradient_bias(-0.1, 1, 1, 0.2, 3), "gap is -0.1, outside of [0, inf]"),
        (lambda: clipped_gradient_bias(0.1, -1, 1, 0.2, 3), "advantage is -1, outside of [0, inf]"),
        (lambda: clipped_gradient_bias(0.1, 1, 1, -0.2, 3), "high is -0.2, outside of [0, inf]"),
        (
            lambda: clipped_gradient_bias(0.1, 1, 1, 0.2, math.inf),
            "dual is inf, outside of [1, 1.79769e+308]\n  hint: without a dual clip no ratio of a "
            "token with A < 0 is too large: give one, such as 3",
        ),
        (
            lambda: kl_penalty_bias(0.1, 1, 1, 0.1, math.inf),
            "clip is inf, outside of [0, 1.79769e+308]\n  hint: a penalty without a largest value "
            "has no bound: clip the KL estimate, such as at 10",
        ),
        (
            lambda: kl_penalty_bias(0.1, 1, 1, -0.1, 10),
            "beta is -0.1, outside of [0, 1.79769e+308]",
        ),
        (
            lambda: kl_penalty_bias(0.1, 1, 1, 0.1, 10, 0),
            "tokens is 0, outside of [1, 1.79769e+308]",
        ),
        (lambda: gradient_direction(math.nan, 1.0), "bias is nan, outside of [0, inf]"),
        (
            lambda: gradient_direction(0.0, 0.0),
            "norm is 0, and must be finite and above 0\n  hint: a gradient of norm 0 has no "
            "direction: certify its norm from more responses",
        ),
        (
            lambda: gradient_norm_at_least(1, 1, 8, 8, 0.0),
            "alpha is 0, and must be finite and above 0",
        ),
        (
            lambda: gradient_norm_at_least(1, 1, 8, 7, 0.1),
            "planned is 7, outside of [8, 1.79769e+308]",
        ),
        (
            lambda: gradient_norm_at_least(1, math.inf, 8, 8, 0.1),
            "largest is inf, outside of [0, 1.79769e+308]\n  hint: the largest norm of one "
            "gradient: clip it",
        ),
        (lambda: tv_with_own_routes(1.2, 0.1), "tv_replayed is 1.2, outside of [0, 1]"),
        (lambda: tv_with_own_routes(0.1, -0.1), "tv_of_routes is -0.1, outside of [0, 1]"),
        (
            lambda: weight_gap_with_lag(0.1, 1.1, PSI["naive"]()),
            "tv_of_lag is 1.1, outside of [0, 1]",
        ),
        (
            lambda: weight_gap_with_lag(0.1, 0.1, PSI["mis"]((0.5, 2.0))),
            "the weighting is 'mis', whose gap jumps at the ends of its band\n  hint: measure "
            "weight_gap with the stale tokens, or use tis, which has no jump",
        ),
        (lambda: conversation_tv_from_token_tv(1.5, 3), "mean_tv is 1.5, outside of [0, 1]"),
        (
            lambda: conversation_tv_from_token_tv(0.1, 0),
            "tokens is 0, outside of [1, 1.79769e+308]",
        ),
    ],
)
def test_what_no_proof_covers_is_refused(call, message):
    with pytest.raises(EvidenceError) as raised:
        call()
    enumerated.refused(raised, message)
