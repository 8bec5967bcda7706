# Reach: what a size decides, against the processes themselves on data with that very mean.

import math

import numpy as np
import pytest

from servanda.theory.stats.bets import weights_above, weights_below
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.reachable import reach, unlucky

ALPHA, CELLS = 0.05, 8
HOLDS, VIOLATED = math.log(1 / ALPHA), math.log(CELLS / ALPHA)


def at_least(n, mean, ones):
    """P(a binomial count >= ones), one term after another."""
    terms = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(mean) + (n - k) * math.log1p(-mean)
        for k in range(ones)
    )  # fmt: skip
    return 1 - math.fsum(map(math.exp, terms))


def deciding(found, n, process, limit):
    """The share of runs that decide at each edge: counts of ones, enumerated."""
    below, above = weights_below(limit), weights_above(limit)
    of = [process(k) for k in range(round(5 * n * limit) + 1)]
    holds = sum(p.log_e_below(limit, below) >= HOLDS for p in of)  # counts 0 to holds - 1
    violated = next(k for k, p in enumerate(of) if p.log_e_above(limit, above) >= VIOLATED)
    return 1 - at_least(n, found.holds, holds), at_least(n, found.violated, violated)


@pytest.mark.parametrize(("n", "limit"), [(400, 0.05), (3000, 0.01), (20000, 0.002)])
def test_nine_of_ten_runs_decide_at_the_edges(n, limit):
    found = reach(n, limit, alpha=ALPHA, cells=CELLS)

    def zero_one(ones):
        return LogMoment.of(np.repeat([1.0, 0.0], [ones, n - ones]))

    for share in deciding(found, n, zero_one, limit):
        assert 0.9 <= share < 0.925  # a count is a whole number
    even = LogMoment.of(np.full(n, found.holds_even))
    assert even.log_e_below(limit, weights_below(limit)) == pytest.approx(HOLDS, abs=1e-6)
    even = LogMoment.of(np.full(n, found.violated_even))
    assert even.log_e_above(limit, weights_above(limit)) == pytest.approx(VIOLATED, abs=1e-6)


def test_groups_that_fill_half_their_room():
    n, limit, capacity, fill = 1000, 0.03, 20, 0.5
    tokens = round(capacity * fill)
    found = reach(n, limit, alpha=ALPHA, cells=CELLS, fill=fill)

    def groups(ones):
        totals = np.repeat([float(tokens), 0.0], [ones, n - ones])
        return GroupRatio(capacity, n, totals, np.full(n, tokens), np.zeros(n, dtype=int))

    for share in deciding(found, n, groups, limit):
        assert 0.9 <= share < 0.925


@pytest.mark.parametrize("n", [20, 100, 1000, 20_000])
@pytest.mark.parametrize("mean", [1e-4, 1e-3, 0.01, 0.1, 0.5, 0.8])
def test_nine_of_ten_counts_are_within_the_unlucky_one(n, mean):
    high, low = (round(n * unlucky(mean, n, sign)) for sign in (1, -1))
    assert 1 - at_least(n, mean, high + 1) >= 0.9 - 1e-9
    assert at_least(n, mean, low) >= 0.9 - 1e-9


def test_all_or_nothing_is_the_worst_and_more_units_decide_more():
    few, many = (reach(n, 0.02, alpha=ALPHA, cells=CELLS) for n in (500, 5000))
    for found in (few, many):
        assert found.holds < found.holds_even < 0.02 < found.violated_even < found.violated
    assert few.holds < many.holds and many.violated < few.violated


def test_what_no_size_decides_is_none():
    assert reach(0, 0.02, alpha=ALPHA, cells=CELLS).holds is None
    assert reach(10, 0.02, alpha=ALPHA, cells=CELLS).holds is None
    assert reach(1, 0.9, alpha=ALPHA, cells=CELLS).violated is None
