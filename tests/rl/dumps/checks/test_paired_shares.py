# The sign test, against scipy's binomial distribution and by counting.

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from servanda.rl.dumps.checks.routes import chance, signs, told_before
from tests.rl.dumps.checks.made import rollouts


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_chance_is_the_tail_of_a_fair_coin(larger, smaller):
    wanted = binom.sf(larger - 1, larger + smaller, 0.5) if larger else 1.0
    assert chance(larger, smaller) == pytest.approx(wanted, rel=1e-8, abs=1e-300)


def test_equal_and_unknown_shares_count_as_neither():
    first, second = np.array([1.0, 0.5, 0.2, np.nan]), np.array([0.5, 0.5, 0.3, 0.1])
    assert signs(first, second).tolist() == [1, 1]


def test_a_prompt_that_neighbours_share_counts_once():
    chunk = rollouts(sequences=4, tokens=5, prompt=2, group_S=("a", "a", "b", "a"))
    told = told_before(chunk).reshape(4, 5)
    assert told.tolist() == [[False] * 5, [True, True, False, False, False], *[[False] * 5] * 2]
