# Blocks of requests: the bootstrap against a slow one, and its coverage by seeded simulation.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from servanda.theory.stats.block_bootstrap import block_interval, level, student_t

seconds = st.floats(1e-3, 10.0)
blocks = st.lists(st.lists(seconds, min_size=1, max_size=5).map(tuple), min_size=2, max_size=8)
percentiles = st.sampled_from([None, 50.0, 90.0, 95.0, 99.9])


def slow_level(values, percentile):
    """The mean, or the smallest value that so many % of them reach, by counting."""
    if percentile is None:
        return math.fsum(values) / len(values)
    wanted = percentile / 100 * len(values) - 1e-9
    return next(v for v in sorted(values) if sum(u <= v for u in values) >= wanted)


def slow_interval(found, percentile, tail, seed, beside=(), resamples=300):
    """Resample by resample, every block written out as often as it was drawn."""
    n = len(found)
    counts_RB = np.random.default_rng(seed).multinomial(n, [1 / n] * n, size=resamples)

    def one(side, counts_B):
        values = [v for b, c in zip(side, counts_B, strict=True) for _ in range(c) for v in b]
        return slow_level(values, percentile)

    levels = [one(found, c) / (one(beside, c) if beside else 1.0) for c in counts_RB]
    reach = math.sqrt(n / (n - 1)) * student_t(1 - tail, n - 1)
    low, high = np.quantile(levels, [stats.norm.cdf(-reach), stats.norm.cdf(reach)])
    at = one(found, [1] * n) / (one(beside, [1] * n) if beside else 1.0)
    factor = math.exp(reach * np.std(np.log(levels)))
    return min(low, at / factor), max(high, at * factor)


@given(blocks, percentiles)
def test_the_level_is_that_of_all_values(found, percentile):
    values = [v for block in found for v in block]
    expected = slow_level(values, percentile)
    assert level(tuple(found), percentile) == pytest.approx(expected, rel=1e-12)
    if percentile is not None:
        quantile = np.quantile(values, percentile / 100, method="inverted_cdf")
        assert level(tuple(found), percentile) == quantile


@given(blocks, percentiles, st.integers(0, 5))
def test_the_interval_is_the_slow_one(found, percentile, seed):
    fast = block_interval(tuple(found), percentile, 0.05, seed, resamples=300)
    assert fast == pytest.approx(slow_interval(found, percentile, 0.05, seed), rel=1e-9)


@pytest.mark.slow
@given(blocks, percentiles)
def test_the_interval_of_a_ratio_draws_the_two_blocks_of_a_pair_together(found, percentile):
    beside = tuple(tuple(2 * v for v in block) for block in found)
    fast = block_interval(tuple(found), percentile, 0.05, 1, beside, resamples=300)
    assert fast == pytest.approx((0.5, 0.5), rel=1e-9)
    other = tuple((*block[::-1], 1.0) for block in found)
    fast = block_interval(tuple(found), percentile, 0.05, 1, other, resamples=300)
    assert fast == pytest.approx(slow_interval(found, percentile, 0.05, 1, other), rel=1e-9)


@pytest.mark.parametrize("freedom", [9, 19, 39])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.9917, 0.9995])
def test_student_t_is_that_of_the_tables(freedom, p):
    assert student_t(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-3)


def requests(rng, n):
    """Blocks of 8 requests: what slows a block slows all of them; p90 of all is PERCENTILE."""
    slow_B = rng.lognormal(0.0, 0.3, size=n)
    return tuple(tuple(row) for row in slow_B[:, None] * rng.lognormal(0.0, 0.3, size=(n, 8)))


MEAN = math.exp(0.3**2)  # a product of two lognormals
P90 = math.exp(stats.norm.ppf(0.9) * math.sqrt(2 * 0.3**2))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("percentile", "truth", "n", "at_least"),
    [(None, MEAN, 10, 0.92), (None, MEAN, 20, 0.92), (90.0, P90, 10, 0.9), (90.0, P90, 40, 0.92)],
)
def test_the_interval_covers_the_truth_about_as_often_as_it_says(percentile, truth, n, at_least):
    """Nominally 95 %.  A tail beyond the slowest of ten blocks cannot be seen in them."""
    rng = np.random.default_rng(7)
    runs = 400
    inside = 0
    for seed in range(runs):
        low, high = block_interval(requests(rng, n), percentile, 0.025, seed, resamples=400)
        inside += low <= truth <= high
    assert inside / runs >= at_least


def test_requests_as_units_would_be_far_too_narrow():
    rng = np.random.default_rng(7)
    inside = 0
    for seed in range(100):
        apart = tuple((v,) for block in requests(rng, 10) for v in block)
        low, high = block_interval(apart, None, 0.025, seed, resamples=400)
        inside += low <= MEAN <= high
    assert inside < 80


def test_a_drift_that_both_share_cancels_in_the_ratio():
    rng = np.random.default_rng(3)
    drift_B = np.linspace(1.0, 3.0, 20)
    own = tuple(tuple(1.1 * d * rng.lognormal(0, 0.02, 8)) for d in drift_B)
    stable = tuple(tuple(d * rng.lognormal(0, 0.02, 8)) for d in drift_B)
    low, high = block_interval(own, None, 0.025, 1, stable)
    assert 1.08 < low < 1.1 < high < 1.12
    low, high = block_interval(own, None, 0.025, 1)
    assert high / low > 1.3  # alone, the drift is all there is to see
