# What a part of a row, or a logged number, says of the TV: by definition and by hand.

import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.theory.theorems.partial_observation import (
    LOGGED,
    chi2_from_second_moment,
    tv_at_least_probs_diff,
    tv_from_mean_abs_log_ratio,
    tv_from_mult_prob_error,
    tv_interval_full,
    tv_rao_blackwell,
)
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.bounds.theorem import THEOREMS
from servanda.theory.divergence.topk import interval
from servanda.theory.divergence.topk_rows import TopK, TopRows
from tests import oracles
from tests.theory.bounds import enumerated

NAMES = Path(__file__).parents[3] / "docs" / "reference" / "metric_names.md"

counts = st.lists(st.integers(0, 12), min_size=5, max_size=5).filter(any)
positive = st.lists(st.integers(1, 12), min_size=5, max_size=5)


def law(row):
    return np.array(row) / sum(row)


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(x)


def drawn(p_V, q_V):
    """The tokens that infer can draw, and log p - log q of each."""
    ids = np.flatnonzero(q_V)
    return ids, log(p_V[ids]) - np.log(q_V[ids])


def top(q_V, k, vocabulary=None):
    ids = np.argsort(-q_V, kind="stable")[None, :k]
    return TopK(ids, log(q_V[ids]), vocabulary)


@given(counts, counts, st.integers(1, 5))
def test_a_token_that_stands_for_the_returned_ones_reads_the_same_tv_more_steadily(p, q, k):
    p_V, q_V = law(p), law(q)
    ids, log_ratio_N = drawn(p_V, q_V)
    returned = np.argsort(-q_V, kind="stable")[:k]
    n = len(ids)
    x_N = tv_rao_blackwell(
        np.tile(log(p_V[returned]), (n, 1)),
        np.tile(log(q_V[returned]), (n, 1)),
        log_ratio_N,
        np.isin(ids, returned),
    )
    alone_N = np.maximum(1 - np.exp(log_ratio_N), 0)
    assert ((x_N >= 0) & (x_N <= 1)).all()
    assert q_V[ids] @ x_N == pytest.approx(oracles.tv(p_V, q_V), abs=1e-12)
    assert q_V[ids] @ x_N**2 <= q_V[ids] @ alone_N**2 + 1e-12


def test_the_returned_tokens_share_what_they_lost_and_nothing_returned_is_the_sampled_token():
    train, infer = log(np.array([[0.1, 0.5], [0.1, 0.5]])), log(np.array([[0.4, 0.4], [0.4, 0.4]]))
    found = tv_rao_blackwell(train, infer, [math.nan, math.log(0.5)], [True, False])
    assert found == pytest.approx([0.3 / 0.8, 0.5])
    nothing = np.full((2, 3), -math.inf)
    found = tv_rao_blackwell(nothing, nothing, [-math.inf, 5000.0], [False, False])
    assert found.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_of_whole_rows_against_returned_tokens_hold_the_tv_and_are_attained(seed):
    rng = np.random.default_rng(seed)
    p_V, q_V = (rng.gamma(0.7, size=9) for _ in range(2))
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    infer = top(q_V, int(rng.integers(2, 7)), 9)
    ((lower, upper),) = tv_interval_full(log(p_V)[None], infer)
    assert lower - 1e-12 <= oracles.tv(p_V, q_V) <= upper + 1e-12
    low, high = completions(p_V, infer)
    assert lower == pytest.approx(oracles.tv(p_V, low), abs=1e-9)
    assert upper == pytest.approx(oracles.tv(p_V, high), abs=1e-9)


def completions(p_V, infer):
    """Rows that would have returned these tokens: nearest to train, and farthest from it."""
    known = np.zeros(len(p_V))
    known[infer.ids_RK[0]] = infer.p_RK[0]
    hidden = np.setdiff1d(np.arange(len(p_V)), infer.ids_RK[0])
    cap, tail = infer.least_R1.item(), 1 - infer.p_RK.sum()
    near, far = known.copy(), known.copy()
    # what train has, up to the cap; what is left goes anywhere
    left = tail
    for room in (np.minimum(p_V, cap), np.full(len(p_V), cap)):
        for token in hidden:
            put = min(left, room[token] - near[token])
            near[token], left = near[token] + max(put, 0), left - max(put, 0)
    left = tail
    for token in hidden[np.argsort(p_V[hidden], kind="stable")]:
        far[token] = min(left, cap)
        left -= far[token]
    return near, far


@given(positive, positive, st.integers(1, 5))
def test_whole_rows_of_train_never_say_less_than_its_returned_tokens(p, q, k):
    p_V, q_V = law(p), law(q)
    infer = top(q_V, k, 5)
    ((lower, upper),) = tv_interval_full(log(p_V)[None], infer)
    ((low, high),) = interval("tv", TopRows(top(p_V, k, 5), infer))
    assert low - 1e-9 <= lower <= upper + 1e-12
    assert upper <= high + 1e-9


def test_an_unusable_row_has_no_interval():
    """Too much mass, nothing known, a NaN; then one that is fine."""
    p_RK = np.array([[0.9, 0.9], [0.0, 0.0], [math.nan, 0.1], [0.5, 0.3]])
    infer = TopK([[0, 1], [-1, 1], [0, 1], [0, 1]], log(p_RK))
    ends_R2 = tv_interval_full(log(np.full((4, 3), 1 / 3)), infer)
    assert np.isnan(ends_R2).all(axis=1).tolist() == [True, True, True, False]


@given(positive, positive)
def test_what_trainers_log_bounds_the_tv_on_the_side_that_it_says(p, q):
    p_V, q_V = law(p), law(q)
    _, log_ratio_N = drawn(p_V, q_V)
    tv, kl = oracles.tv(p_V, q_V), oracles.kl(q_V, p_V)
    mean = q_V @ np.abs(log_ratio_N)
    largest = max(1.0, (p_V / q_V).max())
    chi2 = oracles.EXACT["chi2"](p_V, q_V)
    assert tv <= tv_from_mean_abs_log_ratio(mean, kl) + 1e-12
    assert tv_from_mean_abs_log_ratio(mean, kl) <= tv_from_mean_abs_log_ratio(mean)
    assert tv <= tv_from_mult_prob_error(q_V @ np.exp(np.abs(log_ratio_N))) + 1e-12
    assert tv >= tv_at_least_probs_diff(q_V @ np.abs(p_V - q_V)) - 1e-12
    assert chi2 <= chi2_from_second_moment(q_V @ log_ratio_N**2, largest) * (1 + 1e-9) + 1e-12
    assert chi2_from_second_moment(1.0, largest) <= largest**2


def test_numbers_that_stacks_report():
    """vime 64 on Qwen3-4B; NeMo-RL's gate; verl 7986, whose KL is .0466."""
    assert tv_from_mean_abs_log_ratio(0.011) == 0.011
    assert tv_from_mean_abs_log_ratio(0.011, 6e-4) == pytest.approx(0.0058)
    assert tv_from_mean_abs_log_ratio(0.01, 0.05) == 0.01  # k3 of one sample may be above the mean
    assert tv_from_mult_prob_error([1.0, 1.05, 3e9]) == pytest.approx([0.0, 0.025, 1.0])
    assert tv_at_least_probs_diff(1.9e-6) == 1.9e-6


def test_chi2_is_the_second_moment_at_small_drift_and_endless_without_mass():
    assert chi2_from_second_moment([0.0, 1e-4], 1.0) == pytest.approx([0.0, 1e-4])
    assert chi2_from_second_moment(1e-4, 1 + 1e-9) == pytest.approx(1e-4)
    assert tv_from_mean_abs_log_ratio(math.inf) == 1.0
    assert chi2_from_second_moment(math.inf, 2.0) == math.inf
    assert chi2_from_second_moment([0.0, 1.0], 1e200).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("name", [*LOGGED])
def test_a_logged_name_points_to_a_theorem_of_one_number_and_stands_in_the_glossary(name):
    logged = LOGGED[name]
    assert logged.theorem in THEOREMS
    assert set(logged.assumes) <= set(ASSUMPTIONS)
    value = THEOREMS[logged.theorem].function(1.0)
    assert 0 <= value <= 1
    assert f"`{name}`" in NAMES.read_text(encoding="utf-8")


def test_only_probabilities_bound_from_below():
    assert [n for n, logged in LOGGED.items() if logged.direction == "at least"] == [
        "training/rollout_probs_diff_mean"
    ]


ROW = np.log([[0.5, 0.5]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tv_rao_blackwell(ROW, ROW[:, :1], [0.0], [True]),
            "(1, 2) train logprobs and (1, 1) infer logprobs of returned tokens for (1,) sampled "
            "tokens\n  hint: gather train at infer's ids: both are [tokens, k]",
        ),
        (
            lambda: tv_rao_blackwell(ROW, [[0.0, 0.0]], [0.0], [True]),
            "the returned tokens of a row are no part of a distribution\n"
            "  hint: give the logprobs of the distribution that was sampled, each token once",
        ),
        (
            lambda: tv_rao_blackwell(ROW, np.full((1, 2), -math.inf), [0.0], [True]),
            "a sampled token is among the returned ones, and none was returned\n"
            "  hint: among says whether the sampled token is in its row of returned ones",
        ),
        (
            lambda: tv_rao_blackwell(ROW, ROW, [math.nan], [False]),
            "what was sampled has no usable log ratio\n"
            "  hint: drop sequences with unusable tokens as missing first",
        ),
        (
            lambda: tv_interval_full(ROW, TopK([[0]], [[-0.1]], vocabulary=3)),
            "1 train rows of 2 tokens for 1 infer rows of 3\n"
            "  hint: give whole rows of train at infer's positions",
        ),
        (
            lambda: tv_interval_full(ROW, TopK([[2]], [[-0.1]])),
            "token id 2 in train rows of 2 tokens\n"
            "  hint: give whole rows of train, padded ids included",
        ),
        (lambda: tv_from_mean_abs_log_ratio(-1.0), "mean_abs_log_ratio is -1, outside of [0, inf]"),
        (
            lambda: tv_from_mult_prob_error(0.05),
            "mult_prob_error is 0.05, outside of [1, inf]\n"
            "  hint: it is a mean of ratios, 1 where the kernels agree",
        ),
        (lambda: tv_at_least_probs_diff(1.5), "mean_probs_diff is 1.5, outside of [0, 1]"),
        (lambda: chi2_from_second_moment(0.1, 0.5), "largest is 0.5, outside of [1, 1.79769e+308]"),
    ],
)
def test_what_no_bound_speaks_of_is_refused(call, message):
    with pytest.raises(EvidenceError) as error:
        call()
    enumerated.refused(error, message)
