# The projection of sizes, against its closed form at 0 and against simulated runs.

import math

import numpy as np
import pytest

from servanda.theory.stats.bets import weights_above, weights_below
from servanda.theory.stats.interval import units_at_best, units_expected
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.reachable import unlucky

CASES = [(0.1, 0.05), (0.05, 0.01), (0.2, 0.3), (0.02, 0.06)]


def log_e(process, limit, truth, best=0.0):
    if truth < limit:
        return process.log_e_below(limit, weights_below(limit, best))
    return process.log_e_above(limit, weights_above(limit, best))


@pytest.mark.parametrize("limit", [0.5, 0.1, 0.01, 1e-3, 1e-4])
def test_at_a_truth_of_0_it_is_what_is_needed_at_best(limit):
    assert units_expected(limit, 0.0, 0.05) == units_at_best(limit, 0.05)


def test_at_a_truth_of_0_it_is_the_closed_form():
    """With the grid's best component alone n log(1/(1 - t m)) = log 1/alpha, t = .99."""
    limit, alpha = 0.3, 0.05
    found = units_expected(limit, 0.0, alpha)
    assert found is not None
    best = math.log(1 / alpha) / -math.log1p(-0.99 * limit)
    everyone = math.log(16 / alpha) / -math.log1p(-0.99 * limit)  # the mixture has 16
    assert best <= found <= everyone + 1


@pytest.mark.parametrize(("limit", "truth"), CASES)
def test_nine_of_ten_simulated_runs_need_no_more(limit, truth):
    alpha, cells, rng = 0.05, 4, np.random.default_rng(11)
    expected = units_expected(limit, truth, alpha, cells)
    assert expected is not None
    price = math.log((1 if truth < limit else cells) / alpha)
    needed = []
    for _ in range(200):
        process, step = LogMoment(), max(expected // 20, 1)
        while True:
            process += LogMoment.of((rng.random(step) < truth).astype(float))
            e = (
                process.log_e_below(limit, weights_below(limit))
                if truth < limit
                else process.log_e_above(limit, weights_above(limit))
            )
            if e >= price:
                break
        needed.append(process.n)
    inside = np.mean(np.array(needed) <= expected)
    assert 0.9 - 2 * math.sqrt(0.09 / 200) <= inside  # binomial margin of 200 runs
    assert np.median(needed) <= 0.8 * expected


@pytest.mark.parametrize(("limit", "truth"), CASES)
def test_values_of_0_and_1_are_the_worst_case(limit, truth):
    """The same mean from any other values decides no later."""
    n = units_expected(limit, truth, 0.05)
    assert n is not None
    process = LogMoment.of(np.full(n, truth))
    e = (
        process.log_e_below(limit, weights_below(limit))
        if truth < limit
        else process.log_e_above(limit, weights_above(limit))
    )
    assert e >= math.log(1 / 0.05)


def test_it_grows_towards_the_limit_and_is_none_at_it():
    sizes = [units_expected(0.1, truth, 0.05) for truth in (0.0, 0.03, 0.06, 0.09)]
    assert sizes == sorted(sizes, key=float) and len(set(sizes)) == 4
    assert units_expected(0.1, 0.1, 0.05) is None
    assert units_expected(0.0, 0.0, 0.05) is None


def test_only_a_violation_is_shared_among_cells():
    assert units_expected(0.1, 0.05, 0.05, 1) == units_expected(0.1, 0.05, 0.05, 9)
    assert units_expected(0.1, 0.2, 0.05, 1) < units_expected(0.1, 0.2, 0.05, 9)


def test_what_identical_kernels_are_need_not_be_0():
    """A metric between -9 and 1 is x = 0.9 where the kernels agree; one unit in 400 is 1."""
    limit, best, price = 0.9005, 0.9, math.log(1 / 0.05)
    assert units_expected(limit, best, 0.05, best=best) == units_at_best(limit, 0.05, best)
    found = units_expected(limit, best + 0.1 / 400, 0.05, best=best)
    ones = round(found * unlucky(1 / 400, found, 1))
    for more, decides in ((0, True), (round(0.1 * found), False)):
        x = np.repeat([1.0, best], [ones + more, found - ones - more])
        e = LogMoment.of(x).log_e_below(limit, weights_below(limit, best))
        assert (e >= price) == decides
