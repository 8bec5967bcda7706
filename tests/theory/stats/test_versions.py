# Version fit and lag split, against enumeration and simulation.

import math
from itertools import product

import numpy as np
import pytest

from servanda.theory.stats.lag_split import LagSplit
from servanda.theory.stats.version_fit import VersionFit, sign_bound


@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_the_bound_is_above_the_binomial_tail_by_enumeration(n):
    for heads in range(n + 1):
        tail = math.fsum(math.comb(n, i) for i in range(heads, n + 1)) / 2**n
        assert sign_bound(heads, n) >= tail * (1 - 1e-12)


def test_symmetric_noise_is_nearer_to_another_version_at_most_half_of_the_time():
    """Every sign of the noise of six tokens: the exact probability, for many changes."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        noise, change = rng.exponential(1, 6), rng.normal(0, 1, 6)
        signs = np.array([*product((-1, 1), repeat=6)]) * noise
        nearer = np.abs(signs + change).sum(axis=1) < np.abs(signs).sum(axis=1)
        assert nearer.mean() <= 0.5


def test_a_fit_adds_up():
    one, two = VersionFit(3, 1, 0.5, 2.0, (0, 0)), VersionFit(5, 0, 0.25, 1.0, (1, 2))

    assert one + two == VersionFit(8, 1, 0.75, 3.0, (0, 2))
    assert (one + two).p == sign_bound(8, 9)


def lagged(seed, slope, groups=40, each=50):
    rng = np.random.default_rng(seed)
    lag_N = np.repeat(rng.integers(0, 4, groups), each).astype(float)
    scale_N = 0.02 + slope * lag_N
    drift_N = np.abs(rng.normal(0, scale_N * math.sqrt(math.pi / 2)))
    return drift_N, lag_N, np.repeat(np.arange(groups), each), [f"g{i}" for i in range(groups)]


def test_the_line_is_that_of_least_squares():
    drift_N, lag_N, group_N, names = lagged(1, 0.01)
    slope, gap = np.polyfit(lag_N, drift_N, 1)

    line = LagSplit.of(drift_N, lag_N, group_N, names).line

    assert (line.gap, line.slope) == (pytest.approx(gap), pytest.approx(slope))
    assert "at staleness 0, and an update adds" in str(line)


@pytest.mark.parametrize("slope", [0.0, 0.01])
def test_the_interval_contains_the_slope_about_as_often_as_it_says(slope):
    """Of 100 runs of 40 groups each; 95 % is meant, and 88 allows for the approximation."""
    lines = [LagSplit.of(*lagged(seed, slope)).line for seed in range(100)]
    inside = sum(line.slope_interval[0] <= slope <= line.slope_interval[1] for line in lines)

    assert inside >= 88


def test_one_age_or_a_few_groups_have_no_line():
    drift_N, lag_N, group_N, names = lagged(2, 0.01)

    assert LagSplit.of(drift_N, np.zeros_like(lag_N), group_N, names).line is None
    assert LagSplit.of(drift_N[:100], lag_N[:100], group_N[:100], names).line is None
    assert LagSplit().line is None
