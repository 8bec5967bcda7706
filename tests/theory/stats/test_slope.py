# The interval of a slope: by enumeration of signs, by its definition, and by simulation.

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.theory.stats.slope import (
    EVERYTHING,
    slope_interval,
    slope_of,
    unit_sums,
)

ALPHA = 0.05
SIZES = st.lists(st.floats(0.01, 100), min_size=12, max_size=12)


@pytest.mark.slow
@given(SIZES, SIZES)
def test_of_all_signs_of_the_noise_few_exclude_the_true_slope(noise, xx):
    """The oracle: every pattern of signs of symmetric noise is equally likely."""
    noise_U, xx_U = np.array(noise), np.array(xx)
    signs = np.array([*itertools.product((-1, 1), repeat=len(noise))])

    excluded = 0
    for sign_U in signs:
        low, high = slope_interval(xx_U + sign_U * noise_U, xx_U, ALPHA)
        excluded += not low <= 1 <= high

    assert excluded <= ALPHA * len(signs)


def test_a_slope_inside_the_interval_is_one_whose_statistic_is_below_the_bound():
    rng = np.random.default_rng(0)
    xx_U = rng.exponential(1.0, 40) + 0.5
    xy_U = 0.8 * xx_U + rng.normal(0, 0.3, 40)
    bound = math.sqrt(2 * math.log(2 / ALPHA))

    def statistic(slope):
        z_U = xy_U - slope * xx_U
        return abs(z_U.sum()) / math.sqrt(z_U @ z_U)

    low, high = slope_interval(xy_U, xx_U, ALPHA)
    assert low < slope_of(xy_U, xx_U) < high
    assert statistic(low) == pytest.approx(bound) and statistic(high) == pytest.approx(bound)
    for slope in np.linspace(-1, 3, 81):
        assert (low < slope < high) == (statistic(slope) < bound)


def test_units_are_summed_over_their_values_and_repetitions_and_weighted_by_x():
    x_KN = np.array([[3.0, 0.0, 1.0], [0.0, 4.0, 0.0]])
    y_KN = np.array([[6.0, 5.0, 1.0], [7.0, 4.0, 9.0]])

    xy_U, xx_U = unit_sums(x_KN, y_KN, np.array([0, 2]))

    assert xy_U.tolist() == [(18 + 16) / 5, 1.0] and xx_U.tolist() == [5.0, 1.0]


def test_a_unit_without_x_is_left_out_and_without_any_x_nothing_is_known():
    x_KN, start_U = np.array([[0.0, 0.0, 2.0, 1.0]]), np.array([0, 2])

    xy_U, _ = unit_sums(x_KN, x_KN, start_U)
    none_U, _ = unit_sums(0 * x_KN, x_KN, start_U)

    assert xy_U.size == 1 and none_U.size == 0
    assert slope_interval(none_U, none_U, ALPHA) == EVERYTHING and math.isnan(
        slope_of(none_U, none_U)
    )


def test_equal_sides_have_a_slope_of_exactly_one():
    x_KN = np.random.default_rng(1).normal(size=(3, 640))
    sums = unit_sums(x_KN, x_KN, np.arange(0, 640, 10))

    assert slope_of(*sums) == 1.0
    assert slope_interval(*sums, ALPHA) == pytest.approx((1.0, 1.0), abs=1e-6)
