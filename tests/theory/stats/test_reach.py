# Reach: what a size decides, against the processes themselves on data with that very mean.

import math

import numpy as np
import pytest

from servanda.theory.stats.bets import weights_above, weights_below
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.reachable import reach

ALPHA, CELLS = 0.05, 8
HOLDS, VIOLATED = math.log(1 / ALPHA), math.log(CELLS / ALPHA)


@pytest.mark.parametrize(("n", "limit"), [(400, 0.05), (3000, 0.01), (20000, 0.002)])
def test_the_edges_are_those_of_the_process_on_exact_shares(n, limit):
    below, above = weights_below(limit), weights_above(limit)
    found = reach(n, limit, alpha=ALPHA, cells=CELLS)

    def zero_one(ones):
        return LogMoment.of(np.repeat([1.0, 0.0], [ones, n - ones]))

    # a share is a whole number of n, so the edge lies between two of them
    assert zero_one(math.floor(found.holds * n)).log_e_below(limit, below) >= HOLDS
    assert zero_one(math.ceil(found.holds * n) + 1).log_e_below(limit, below) < HOLDS
    assert zero_one(math.ceil(found.violated * n)).log_e_above(limit, above) >= VIOLATED
    assert zero_one(math.floor(found.violated * n) - 1).log_e_above(limit, above) < VIOLATED
    even = LogMoment.of(np.full(n, found.holds_even))
    assert even.log_e_below(limit, below) == pytest.approx(HOLDS, abs=1e-6)
    even = LogMoment.of(np.full(n, found.violated_even))
    assert even.log_e_above(limit, above) == pytest.approx(VIOLATED, abs=1e-6)


def test_groups_that_fill_half_their_room():
    n, limit, capacity, fill = 1000, 0.03, 20, 0.5
    below, above = weights_below(limit), weights_above(limit)
    found = reach(n, limit, alpha=ALPHA, cells=CELLS, fill=fill)
    tokens = round(capacity * fill)

    def groups(mean):
        ones = round(mean * n)
        totals = np.repeat([float(tokens), 0.0], [ones, n - ones])
        return GroupRatio(capacity, n, totals, np.full(n, tokens), np.zeros(n, dtype=int))

    assert groups(found.holds - 1 / n).log_e_below(limit, below) >= HOLDS
    assert groups(found.holds + 2 / n).log_e_below(limit, below) < HOLDS
    assert groups(found.violated + 1 / n).log_e_above(limit, above) >= VIOLATED
    assert groups(found.violated - 2 / n).log_e_above(limit, above) < VIOLATED


def test_all_or_nothing_is_the_worst_and_more_units_decide_more():
    few, many = (reach(n, 0.02, alpha=ALPHA, cells=CELLS) for n in (500, 5000))
    for found in (few, many):
        assert found.holds < found.holds_even < 0.02 < found.violated_even < found.violated
    assert few.holds < many.holds and many.violated < few.violated


def test_what_no_size_decides_is_none():
    assert reach(0, 0.02, alpha=ALPHA, cells=CELLS).holds is None
    assert reach(10, 0.02, alpha=ALPHA, cells=CELLS).holds is None
    assert reach(1, 0.9, alpha=ALPHA, cells=CELLS).violated is None


@pytest.mark.parametrize("seed", range(3))
def test_simulated_runs_decide_beyond_the_edges_and_not_within(seed):
    """At 0.6 of the way to an edge most runs decide; half-way past it to the limit few do."""
    n, limit, runs = 2000, 0.05, 60
    below, above = weights_below(limit), weights_above(limit)
    found = reach(n, limit, alpha=ALPHA, cells=CELLS)
    rng = np.random.default_rng(seed)

    def share(truth, decides):
        x_RN = (rng.random((runs, n)) < truth).astype(float)
        return np.mean([decides(LogMoment.of(x_N)) for x_N in x_RN])

    def holds(process):
        return process.log_e_below(limit, below) >= HOLDS

    def violated(process):
        return process.log_e_above(limit, above) >= VIOLATED

    assert share(0.8 * found.holds, holds) > 0.9
    assert 0.25 < share(found.holds, holds) < 0.75
    assert share((found.holds + limit) / 2, holds) < 0.2
    assert share(1.2 * found.violated, violated) > 0.9
    assert 0.25 < share(found.violated, violated) < 0.75
