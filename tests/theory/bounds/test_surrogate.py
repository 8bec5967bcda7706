# The error of a first-order surrogate, against enumeration and by hand.

import math

import numpy as np
import pytest
from benchmarks.theory.theorems.surrogate import surrogate_error, surrogate_error_from_tv
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from tests.theory.bounds import enumerated
from tests.theory.bounds.enumerated import PROMPT, WIDTH

full = st.lists(st.integers(1, 6), min_size=3, max_size=3)  # every token has mass
tables = st.fixed_dictionaries({"": full, "a": full, "b": full})


def value(pair, reward, new):
    """E_infer of the reward once `new` was drawn, by recursion."""
    if len(new) == WIDTH or (new and new[-1] == 2):
        return reward(new)
    _, q_V = pair.rows((*PROMPT, *new))
    return math.fsum(q_V[t] * value(pair, reward, (*new, t)) for t in range(3))


def surrogate(pair, reward, new=(), q=1.0):
    """E_infer of the sum of (w - 1) times the advantage under infer, by recursion."""
    if len(new) == WIDTH or (new and new[-1] == 2):
        return 0.0
    p_V, q_V = pair.rows((*PROMPT, *new))
    here = value(pair, reward, new)
    return math.fsum(
        q * (p_V[t] - q_V[t]) * (value(pair, reward, (*new, t)) - here)
        + surrogate(pair, reward, (*new, t), q * q_V[t])
        for t in range(3)
    )


@given(tables, tables, st.integers(0, 6))
def test_the_surrogate_misses_no_more_than_either_bound(p, q, salt):
    pair = enumerated.pair(p, q)
    answers = enumerated.answers(pair)

    def reward(new):
        return (sum((i + 2) * (t + salt) for i, t in enumerate(new)) % 7) / 6

    missed = pair.reward_drift(PROMPT, WIDTH, reward) - surrogate(pair, reward)
    bound = answers.mean(surrogate_error(answers.log_ratio_N, answers.length_S))
    mean_T = [0.0] * WIDTH
    for position, context, mass in pair.visits(PROMPT, WIDTH):
        mean_T[position] += mass * pair.token_tv(context)
    largest = max(pair.token_tv((t,)) for t in range(3))
    assert abs(missed) <= bound + 1e-12
    assert abs(missed) <= surrogate_error_from_tv(mean_T, largest) + 1e-12


def test_each_pair_of_steps_counts_once_and_a_single_token_misses_nothing():
    log_ratio_N = np.log([1.5, 0.5, 0.25, 0.5, 4.0, 0.5])
    found = surrogate_error(log_ratio_N, [3, 1, 2])
    assert found == pytest.approx([0.5 * 0.5 + (0.5 + 0.5) * 0.75, 0.0, 3.0 * 0.5])
    assert surrogate_error([-1.0], [0, 1, 0]).tolist() == [0.0, 0.0, 0.0]
    assert surrogate_error([], []).tolist() == []


def test_an_endless_weight_counts_only_before_a_token_that_lost_mass():
    """0 times infinity is nothing here: where no mass was lost, no step is missed."""
    found = surrogate_error([5000.0, 0.0, 5000.0, -1.0, -math.inf, -math.inf], [2, 2, 2])
    assert found.tolist() == [0.0, math.inf, 1.0]


def test_the_form_by_tv_by_hand():
    """Half of 4 sum D min(1, (T - t) eps) in arXiv 2512.23075."""
    assert surrogate_error_from_tv([0.1, 0.2, 0.3], 0.4) == pytest.approx(
        2 * (0.1 * 0.8 + 0.2 * 0.4 + 0.3 * 0.0)
    )
    # the last factor is at most 1
    assert surrogate_error_from_tv([0.1, 0.0, 0.0], 0.9) == pytest.approx(0.2)
    assert surrogate_error_from_tv(0.5, 1.0) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: surrogate_error([math.nan], [1]),
            "what was sampled has no usable log ratio\n"
            "  hint: drop sequences with unusable tokens as missing first",
        ),
        (
            lambda: surrogate_error([0.0], [-1, 2]),
            "1 tokens for 2 sequences of 1 tokens in all\n"
            "  hint: give the tokens of all sequences one after another, and each one's length",
        ),
        (lambda: surrogate_error_from_tv([0.1, 2.0], 0.1), "mean_tv is 2, outside of [0, 1]"),
        (lambda: surrogate_error_from_tv([0.1], -1.0), "largest_tv is -1, outside of [0, 1]"),
    ],
)
def test_what_no_bound_speaks_of_is_refused(call, message):
    with pytest.raises(EvidenceError) as error:
        call()
    enumerated.refused(error, message)
