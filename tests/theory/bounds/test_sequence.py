# From the drift of tokens to whole answers and rewards, against enumeration and by hand.

import math

import numpy as np
import pytest
from benchmarks.theory.sequence import two_level_tv
from benchmarks.theory.theorems.sequence import reward_drift_from_chi2, reward_interval, tv_from_kl
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.sequence import (
    is_vacuous,
    osc_for_reward_drift,
    reward_drift_from_tv,
    sequence_estimators,
    sequence_tv_from_osc,
    sequence_tv_from_token_tv,
    sequence_tv_gaussian,
    shortfall,
)
from tests import oracles
from tests.theory.bounds import enumerated
from tests.theory.bounds.enumerated import PROMPT, WIDTH

rows = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)
tables = st.fixed_dictionaries({"": rows, "a": rows, "b": rows})
HALF = {"": [1, 1, 0]}  # never ends on its own


@given(tables, tables)
def test_the_exact_estimator_is_the_tv_of_whole_answers_and_the_others_bound_it(p, q):
    pair = enumerated.pair(p, q)
    answers = enumerated.answers(pair)
    found = sequence_estimators(answers.log_ratio_N, answers.length_S)
    exact, coupling, total = map(answers.mean, (found.exact, found.coupling, found.total))
    assert exact == pytest.approx(pair.sequence_tv(PROMPT, WIDTH), abs=1e-12)
    assert total == pytest.approx(pair.expected(PROMPT, WIDTH, pair.token_tv), abs=1e-12)
    assert exact <= coupling + 1e-12 and coupling <= total + 1e-12


@given(tables, tables)
def test_the_coupling_of_a_sequence_is_a_product_and_its_total_a_sum(p, q):
    answers = enumerated.answers(enumerated.pair(p, q))
    found = sequence_estimators(answers.log_ratio_N, answers.length_S)
    tokens = np.split(np.exp(answers.log_ratio_N), np.cumsum(answers.length_S)[:-1])
    for w_T, exact, coupling, total in zip(
        tokens, found.exact, found.coupling, found.total, strict=True
    ):
        assert exact == pytest.approx(max(1 - math.prod(w_T), 0), abs=1e-12)
        assert coupling == pytest.approx(1 - math.prod(min(w, 1) for w in w_T), abs=1e-12)
        assert total == pytest.approx(sum(max(1 - w, 0) for w in w_T), abs=1e-12)


def test_no_weight_is_too_large_or_too_small():
    """-inf is a token that train cannot draw; products of the weights would give NaN."""
    log_ratio_N = [-math.inf, 5000.0, 5000.0, -5000.0, -5000.0, 1e-300, -1e-18]
    found = sequence_estimators(log_ratio_N, [2, 2, 1, 1, 1])
    assert found.exact.tolist() == [1.0, 0.0, 1.0, 0.0, 1e-18]
    assert found.coupling.tolist() == [1.0, 1.0, 1.0, 0.0, 1e-18]
    assert found.total.tolist() == [1.0, 1.0, 1.0, 0.0, 1e-18]


def test_a_sequence_without_tokens_does_not_drift():
    assert sequence_estimators([0.5, -0.5], [0, 2, 0]).exact.tolist() == [0.0, 0.0, 0.0]
    assert sequence_estimators([], [0]).total.tolist() == [0.0]


def test_a_long_answer_keeps_the_digits_of_a_small_drift():
    found = sequence_estimators(np.full(8192, -1e-12), [8192])
    assert found.exact.item() == pytest.approx(8.192e-9, rel=1e-6)


def test_shortfall_is_absent_where_the_weight_is():
    assert shortfall([-math.inf, 0.0, 5000.0]).tolist() == [1.0, 0.0, 0.0]
    assert np.isnan(shortfall(math.nan))


@given(tables, tables, st.integers(0, 6))
def test_the_ends_of_the_reward_interval_hold_the_drift_of_any_reward(p, q, salt):
    pair = enumerated.pair(p, q)
    answers = enumerated.answers(pair)

    def reward(new):
        return (sum((i + 2) * (t + salt) for i, t in enumerate(new)) % 7) / 6

    drift = pair.reward_drift(PROMPT, WIDTH, reward)
    with np.errstate(divide="ignore"):
        log_weight_S = np.log(answers.train_S) - np.log(answers.infer_S)
    reward_S = np.array([reward(new) for new in answers.new])
    widths = []
    for cap in (1.0, 2.0, 100.0):
        low, high = map(answers.mean, reward_interval(log_weight_S, reward_S, cap))
        assert low - 1e-12 <= drift <= high + 1e-12
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(pair.sequence_tv(PROMPT, WIDTH), abs=1e-12)  # cap 1
    assert abs(drift) <= reward_drift_from_tv(pair.sequence_tv(PROMPT, WIDTH), 0.0, 1.0) + 1e-12


def test_an_endless_weight_ends_at_the_cap():
    low_S, high_S = reward_interval([5000.0, -math.inf], [0.5, 0.5], cap=3.0)
    assert low_S == pytest.approx([1.0, -0.5])
    assert high_S == pytest.approx([-1.0, 0.5])


def test_a_range_is_what_a_reward_drifts_over():
    assert reward_drift_from_tv([0.1, 0.5], -1.0, 3.0) == pytest.approx([0.4, 2.0])
    assert reward_drift_from_tv(7.0, 0.0, 2.0) == 2.0  # a bound of a TV may be more than 1


def test_a_reward_that_follows_the_weight_drifts_as_far_as_chi2_allows():
    p_V, q_V = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.25, 0.5])
    reward_V = p_V / q_V
    chi2 = oracles.EXACT["chi2"](p_V, q_V)
    std = math.sqrt(q_V @ reward_V**2 - (q_V @ reward_V) ** 2)
    assert reward_drift_from_chi2(chi2, std) == pytest.approx((p_V - q_V) @ reward_V)
    assert reward_drift_from_chi2(math.inf, 0.0) == math.inf  # no support: the spread says nothing


def test_the_union_bound_is_tokens_times_the_mean():
    found = sequence_tv_from_token_tv(6e-4, [1, 128, 1000, 8192])
    assert found == pytest.approx([6e-4, 0.0768, 0.6, 1.0])


@given(tables, tables)
def test_the_union_bound_holds_with_the_mean_number_of_tokens(p, q):
    pair = enumerated.pair(p, q)
    tokens = pair.expected(PROMPT, WIDTH, lambda _: 1.0)
    bound = sequence_tv_from_token_tv(pair.mean_tv([PROMPT], WIDTH), tokens)
    assert pair.sequence_tv(PROMPT, WIDTH) <= bound + 1e-12


def test_of_two_bounds_by_kl_the_smaller_is_given():
    kl = np.array([1e-12, 1e-3, 0.5, 1.0, 2.0, 7.64, 1e3, math.inf])
    pinsker, huber = np.sqrt(kl / 2), np.sqrt(1 - np.exp(-kl))
    assert tv_from_kl(kl)[1:] == pytest.approx(np.minimum(pinsker, huber)[1:], rel=1e-9)
    assert tv_from_kl(1e-12) == pytest.approx(math.sqrt(0.5e-12), rel=1e-9)
    assert tv_from_kl(math.inf) == 1.0


def test_of_dense_kernels_little_can_be_said_of_a_thousand_tokens():
    """A KL of 6.4e-4 a token, as dense bf16 stacks report."""
    assert tv_from_kl([0.64, 8 * 0.64]) == pytest.approx([0.566, 0.997], abs=5e-4)
    assert sequence_tv_gaussian([0.64, 8 * 0.64]) == pytest.approx([0.428, 0.890], abs=5e-4)


@pytest.mark.parametrize("osc", [1e-6, 0.0625, 0.5, 4.0])
def test_one_step_can_drift_as_far_as_its_logits_allow(osc):
    worst = two_level_tv(np.array([osc]), np.array([1 / (1 + math.exp(osc / 2))]), 1)
    assert sequence_tv_from_osc(osc, 1) == pytest.approx(math.tanh(osc / 4), rel=1e-9)
    assert worst == pytest.approx(math.tanh(osc / 4), rel=1e-9)


@pytest.mark.parametrize(("osc", "steps"), [(0.125, 1000), (0.01, 8192), (0.5, 20)])
def test_many_steps_come_within_a_quarter_of_the_bound(osc, steps):
    bound = sequence_tv_from_osc(osc, steps)
    worst = two_level_tv(np.array([osc]), np.array([0.5]), steps).item()
    assert worst <= bound <= math.sqrt(math.pi / 2) * worst


def test_the_bound_is_below_the_sum_the_product_and_the_bounds_by_kl():
    osc, tokens = np.meshgrid(np.geomspace(1e-3, 8, 20), [1, 2, 16, 128, 1024, 8192])
    step = np.tanh(osc / 4)
    kl = np.log(np.expm1(osc) / osc) - 1 + osc / np.expm1(osc)  # the largest of one step
    found = sequence_tv_from_osc(osc, tokens)
    assert (found <= tokens * step * (1 + 1e-9)).all()
    assert (found <= (1 - (1 - step) ** tokens) * (1 + 1e-9)).all()
    assert (found <= tv_from_kl(tokens * kl) * (1 + 1e-6)).all()


def test_drift_without_end_bounds_nothing_and_none_bounds_all():
    assert sequence_tv_from_osc([0.0, math.inf, 1e4], [100, 1, 2]).tolist() == [0.0, 1.0, 1.0]


def test_what_a_twentieth_of_the_range_allows():
    tokens = [1, 128, 1024, 8192]
    found = osc_for_reward_drift(0.05, tokens)
    assert found == pytest.approx([0.2002, 0.0177, 0.00625, 0.00221], rel=3e-3)
    assert osc_for_reward_drift(0.1, tokens, -1.0, 1.0) == pytest.approx(found)


@pytest.mark.parametrize("tokens", [1, 17, 1024])
@pytest.mark.parametrize("drift", [1e-9, 1e-3, 0.05, 0.7, 1.99])
def test_the_design_gives_back_the_drift_that_it_was_made_for(drift, tokens):
    osc = osc_for_reward_drift(drift, tokens, -1.0, 1.0)
    tv = sequence_tv_from_osc(osc, tokens)
    assert reward_drift_from_tv(tv, -1.0, 1.0) == pytest.approx(drift, rel=1e-9)


def test_a_reward_that_may_drift_over_its_range_may_have_any_logits():
    assert osc_for_reward_drift([0.0, 1.0, 5.0], 8).tolist() == [0.0, math.inf, math.inf]


@pytest.mark.parametrize("sigma", [0.01, 0.05])
def test_many_small_steps_come_to_the_normal_value(sigma):
    """Equal two-level steps with the variance of sigma: log W is nearly normal."""
    steps = 2000
    exact = two_level_tv(np.array([2 * sigma]), np.array([0.5]), steps).item()
    kl = steps * math.log(math.cosh(sigma))
    assert sequence_tv_gaussian(kl) == pytest.approx(exact, rel=2e-2)


def test_a_bound_at_the_end_of_the_range_is_vacuous():
    assert not is_vacuous(0.99, 1.0)
    assert is_vacuous(1.0, 1.0)
    assert is_vacuous(math.inf, 1.0)
    assert is_vacuous(math.nan, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sequence_estimators([math.nan], [1]),
            "what was sampled has no usable log ratio\n"
            "  hint: drop sequences with unusable tokens as missing first",
        ),
        (
            lambda: sequence_estimators([math.inf], [1]),
            "what was sampled has no usable log ratio\n"
            "  hint: drop sequences with unusable tokens as missing first",
        ),
        (
            lambda: sequence_estimators([0.0, 0.0], [1, 2]),
            "2 tokens for 2 sequences of 3 tokens in all\n"
            "  hint: give the tokens of all sequences one after another, and each one's length",
        ),
        (
            lambda: reward_interval([0.0], [2.0]),
            "reward is 2, outside of [0, 1]\n"
            "  hint: map the rewards to [0, 1] by the declared range",
        ),
        (lambda: reward_interval([0.0], [1.0], 0.5), "cap is 0.5, outside of [1, 1.79769e+308]"),
        (
            lambda: reward_interval([0.0, 0.0], [1.0]),
            "1 rewards for 2 sequences\n  hint: give each sampled sequence its own reward",
        ),
        (
            lambda: reward_drift_from_tv(0.1, 1.0, 1.0),
            "the rewards' range [1, 1] is empty or endless\n"
            "  hint: give the smallest and the largest reward, such as low=0, high=1",
        ),
        (lambda: reward_drift_from_tv(math.nan, 0, 1), "tv is nan, outside of [0, inf]"),
        (lambda: sequence_tv_from_token_tv(0.1, 0), "tokens is 0, outside of [1, 1.79769e+308]"),
        (lambda: sequence_tv_from_token_tv(1.5, 1), "mean_tv is 1.5, outside of [0, 1]"),
        (lambda: tv_from_kl([0.1, -0.1]), "kl is -0.1, outside of [0, inf]"),
    ],
)
def test_what_no_bound_speaks_of_is_refused(call, message):
    with pytest.raises(EvidenceError) as error:
        call()
    enumerated.refused(error, message)
