# Many questions: e-BH against its definition and against scipy's BH.

import itertools
import math

import numpy as np
import pytest
from benchmarks.theory.slice_multiplicity import e_bh, slice_alpha
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError

logs = st.lists(st.floats(-20, 20), min_size=1, max_size=12)
alphas = st.floats(0.01, 0.5)


def by_definition(log_e, alpha):
    """The largest k such that k e-values are K / (alpha k) or more; the k largest of them."""
    best = 0
    for k in range(1, len(log_e) + 1):
        price = math.log(len(log_e) / alpha) - math.log(k)
        if sum(e >= price for e in log_e) >= k:
            best = k
    return set(sorted(range(len(log_e)), key=lambda i: -log_e[i])[:best])


@given(logs, alphas)
def test_the_largest_are_rejected_as_far_as_they_pay(log_e, alpha):
    rejected = set(np.flatnonzero(e_bh(log_e, alpha)).tolist())
    expected = by_definition(log_e, alpha)
    assert {log_e[i] for i in rejected} == {log_e[i] for i in expected}
    assert rejected >= expected  # equal e-values share their fate


@given(logs, alphas)
def test_it_is_benjamini_and_hochberg_on_the_inverses(log_e, alpha):
    """p = 1 / e, where e is 1 or more, by scipy's adjustment."""
    stats = pytest.importorskip("scipy.stats")
    p = np.exp(-np.maximum(log_e, 0.0))
    adjusted = stats.false_discovery_control(p, method="bh")
    near = np.isclose(adjusted, alpha, rtol=1e-9)
    assert (e_bh(log_e, alpha) == (adjusted <= alpha))[~near].all()


@given(logs, alphas, st.floats(0, 5))
def test_more_evidence_rejects_no_less(log_e, alpha, more):
    assert (e_bh(np.array(log_e) + more, alpha) >= e_bh(log_e, alpha)).all()


def test_the_false_discovery_rate_is_at_most_alpha_when_true_hypotheses_bet_all_they_may():
    """Three true hypotheses whose e-values are 20 or 0, enumerated, beside a sure discovery."""
    alpha, expected = 0.2, 0.0
    for wins in itertools.product([True, False], repeat=3):
        chance = math.prod(1 / 20 if win else 19 / 20 for win in wins)
        log_e = [math.log(20) if win else -math.inf for win in wins] + [50.0]
        rejected = e_bh(log_e, alpha)
        expected += chance * rejected[:3].sum() / rejected.sum()
    assert 0 < expected <= alpha * 3 / 4


def test_no_overflow_and_no_evidence():
    assert e_bh([1e6, -math.inf, -1e6, 2e6], 0.05).tolist() == [True, False, False, True]
    assert e_bh([-math.inf, -math.inf], 0.05).tolist() == [False, False]
    assert e_bh([], 0.05).tolist() == []


def test_an_e_value_that_is_none_is_refused():
    with pytest.raises(EvidenceError, match="the e-value of hypothesis 1 is NaN"):
        e_bh([0.0, math.nan], 0.05)


def test_slices_share_alpha_evenly():
    assert slice_alpha(0.05, 1) == 0.05
    assert slice_alpha(0.05, 8) * 8 == pytest.approx(0.05)


def test_no_slice_shares_nothing():
    with pytest.raises(ValueError, match="alpha is shared by at least one slice, not by 0"):
        slice_alpha(0.05, 0)
