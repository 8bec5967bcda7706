# Bounds of the token-level gradient, by hand.

import math

import numpy as np
import pytest
from benchmarks.theory.theorems.gradient import ppo_clip_bias, score_norm2_logits, sum_p2_from_top_k

from servanda.contract.model import Contract
from servanda.contract.objective import Gradient, GroupAdvantage
from servanda.errors import EvidenceError
from servanda.judgement.clauses.gradient import advantage_bound
from servanda.theory.bounds.gradient import (
    LOGIT_SCORE_NORM,
    group_advantage_bound,
    loss_weights,
    policy_gradient_bias,
    ratio_budget,
)
from tests.theory.bounds import enumerated


def test_a_bias_is_a_gap_times_its_multipliers():
    assert policy_gradient_bias([0.0, 0.02], 2.5, 2.0).tolist() == [0.0, 0.1]
    assert policy_gradient_bias([0.0, 0.02], 1.0, math.inf).tolist() == [0.0, math.inf]


def test_no_token_has_a_larger_score_in_logits_than_the_constant():
    logp = np.log([1.0, 0.5, 1e-12])
    assert pytest.approx(2.0) == LOGIT_SCORE_NORM**2
    # the unlikely token beside a certain one is where it is reached
    found = score_norm2_logits(logp[2], 1.0)
    assert found == pytest.approx(2.0)
    assert score_norm2_logits(logp, [1.0, 0.5, 1.0]).tolist() == pytest.approx([0.0, 0.5, 2.0])


def test_the_score_of_a_nearly_certain_token_keeps_its_digits():
    rest = 1e-9
    logp = math.log1p(-rest)
    assert score_norm2_logits(logp, (1 - rest) ** 2) == pytest.approx(rest**2, rel=1e-6)


def test_top_k_bounds_the_sum_of_squares_by_itself_where_it_is_the_vocabulary():
    low, high = sum_p2_from_top_k(np.log([[0.3, 0.4], [0.9, 0.05]]))
    assert low.tolist() == pytest.approx([0.25, 0.8125])
    # 0.3 more at 0.3 a token; 0.05 more, which one token can hold
    assert high.tolist() == pytest.approx([0.25 + 0.09, 0.8125 + 0.0025])
    with np.errstate(divide="ignore"):
        filled = np.log([[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]])
    low, high = sum_p2_from_top_k(filled)
    assert low.tolist() == pytest.approx([0.3125, 0.0])
    assert high.tolist() == pytest.approx([0.375, 1.0])  # no more than without the fill
    low, high = sum_p2_from_top_k(np.log([0.5, 0.5]))
    assert low == high == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("n", "sample", "population"), [(2, 0.707, 1.0), (8, 2.475, 2.646), (64, 7.875, 7.937)]
)
def test_one_answer_of_a_group_cannot_stand_out_further(n, sample, population):
    reward_G = np.eye(n)[0]
    for std, ddof, bound in (("sample", 1, sample), ("population", 0, population)):
        farthest = (reward_G[0] - reward_G.mean()) / reward_G.std(ddof=ddof)
        assert group_advantage_bound(n, std) == pytest.approx(farthest, rel=1e-12)
        assert group_advantage_bound(n, std) == pytest.approx(bound, abs=5e-4)
        gradient = Gradient(advantage=GroupAdvantage(group_size=n, std=std))
        declared = Contract.model_construct(gradient=gradient)
        assert advantage_bound(declared) == group_advantage_bound(n, std)


def test_a_loss_per_answer_weighs_the_t_th_token_one_over_t():
    assert loss_weights("sequence_mean", [3, 1]).tolist() == [1.0, 1 / 2, 1 / 3, 1.0]
    assert loss_weights("token_mean", [3, 1]).tolist() == [1.0] * 4
    assert loss_weights("sequence_sum", [3, 1]).tolist() == [1.0] * 4
    assert loss_weights("sequence_mean", []).tolist() == []


def test_the_mean_gap_of_an_answer_is_no_bound_where_its_length_divides():
    """Two branches: one short answer that train prefers, else a long one that both write alike."""
    q_V, p_V, length_V = np.array([0.01, 0.99]), np.array([0.05, 0.95]), np.array([1, 200])
    score_VJ = np.eye(2) - p_V
    reach = np.linalg.norm(score_VJ, axis=1).max()
    advantage_V = np.array([1.0, -1.0])
    bias = np.linalg.norm(((q_V - p_V) * advantage_V / length_V) @ score_VJ)

    gap = np.abs(p_V - q_V).sum()  # at the first token; no other has one
    of_tokens = gap / (q_V @ length_V)
    of_answers = gap * (q_V @ (1 / length_V))
    weighted = gap * loss_weights("sequence_mean", [1])[0]

    assert bias > 50 * policy_gradient_bias(of_tokens, 1.0, reach)
    assert bias > 30 * policy_gradient_bias(of_answers, 1.0, reach)
    assert bias <= policy_gradient_bias(weighted, 1.0, reach)


def test_a_clip_drops_what_train_gains_beyond_it_and_cuts_a_weight_at_the_largest():
    log_ratio = np.log([1.5, 1.5, 0.5, 0.5, 1.1, 1.5])
    advantage = [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]
    found = ppo_clip_bias(log_ratio, advantage, 0.2, 0.28, largest=2.0)
    assert found.tolist() == pytest.approx([1.0, -0.5, 0.5, 1.0, -0.1, -0.5])
    found = ppo_clip_bias(np.log([1.5, 300.0]), [-1.0, -1.0], 0.2, 0.28, largest=2.0)
    assert found.tolist() == pytest.approx([-0.5, -1.0])
    assert ppo_clip_bias([-math.inf] * 2, [1.0, -1.0], 0.2, 0.2, 2.0).tolist() == [1.0, 1.0]
    assert ppo_clip_bias(-math.inf, -1.0, 1.0, 0.2, 2.0) == 1.0


def test_the_kernel_gap_uses_up_a_part_of_the_clip_range_or_nothing_or_more_than_it():
    budget = ratio_budget(0.1, 0.2, 0.28)
    assert budget.used_down == pytest.approx(0.45, abs=5e-3)
    assert budget.used_up == pytest.approx(0.41, abs=5e-3)
    assert budget.low == pytest.approx(0.116, abs=5e-4)
    assert budget.high == pytest.approx(0.158, abs=5e-4)
    budget = ratio_budget(0.0, 0.2, 0.28)
    assert (budget.used_down, budget.used_up) == (0, 0)
    assert (budget.low, budget.high) == pytest.approx((0.2, 0.28))
    budget = ratio_budget([0.1, 0.5], 0.2, 0.2)
    assert (budget.used_up > 1).tolist() == [False, True]
    assert (budget.high < 0).tolist() == [False, True]
    budget = ratio_budget([0.1, 5.0], 1.0, 0.2)
    assert budget.used_down.tolist() == [0.0, 0.0]
    assert budget.low.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: group_advantage_bound(1),
            "group_size is 1, outside of [2, inf]\n  hint: one answer has no advantage",
        ),
        (
            lambda: policy_gradient_bias(0.1, -1.0, 1.0),
            "advantage is -1, outside of [0, inf]",
        ),
        (lambda: ratio_budget(-0.1, 0.2, 0.2), "rho is -0.1, outside of [0, inf]"),
        (
            lambda: ratio_budget(0.1, 0.0, 0.2),
            "a clip range of [0, 0.2] has no width on one side\n"
            "  hint: give both distances from 1, such as 0.2 and 0.28",
        ),
        (
            lambda: loss_weights("token_mean", [3, 0]),
            "length is 0, outside of [1, inf]\n  hint: drop answers without a token",
        ),
        (lambda: loss_weights("token_mean", [2.5]), "an answer has 2.5 tokens"),
        (
            lambda: loss_weights("mean", [3]),  # type: ignore[arg-type]
            "no loss is named 'mean'\n  hint: known: token_mean, sequence_sum, sequence_mean",
        ),
        (
            lambda: ppo_clip_bias(math.nan, 1.0, 0.2, 0.2, 2.0),
            "log_ratio is nan, outside of [-inf, inf]",
        ),
        (
            lambda: ppo_clip_bias(0.1, 1.0, 0.2, 0.2, math.inf),
            "largest is inf, outside of [1, 1.79769e+308]\n"
            "  hint: no sample bounds the mean of a weight without a largest value: give one, "
            "such as 2",
        ),
        (
            lambda: sum_p2_from_top_k(np.zeros((3, 0))),
            "logprobs of shape (3, 0): no token of a position was returned\n"
            "  hint: ask for the logprobs of at least one token, [..., K]",
        ),
        (
            lambda: group_advantage_bound(2.9),  # type: ignore[arg-type]
            "a group has 2.9 answers\n  hint: give a whole number of them",
        ),
        (
            lambda: group_advantage_bound(math.inf),  # type: ignore[arg-type]
            "a group has inf answers\n  hint: give a whole number of them",
        ),
        (lambda: score_norm2_logits(0.1, 0.5), "logp_token is 0.1, outside of [-inf, 0]"),
    ],
)
def test_what_no_proof_covers_is_refused(call, message):
    with pytest.raises(EvidenceError) as raised:
        call()
    enumerated.refused(raised, message)
