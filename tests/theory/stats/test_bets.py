# The weights of the bets: what they are, what they promise, and what they save.

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.theory.stats.bets import NEG, POS, mixed, weights_above, weights_below
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.interval import interval, units_to_decide
from servanda.theory.stats.log_moment import LogMoment
from tests import oracles
from tests.theory.stats.test_log_moment import groups, limits, ratio, streams

ODD = [None, 0.0, 1.0, 1e-9, 1 - 1e-9, 0.85, 2.0]


@given(st.one_of(limits, st.sampled_from(ODD)), st.one_of(st.just(0.0), st.floats(-1, 1)))
def test_weights_are_a_distribution_with_an_equal_part(limit, best):
    for weight, bets in ((weights_below(limit, best), NEG), (weights_above(limit, best), POS)):
        assert math.fsum(weight.tolist()) == pytest.approx(1.0, abs=1e-12)
        assert weight.min() >= 0.2 / len(bets) - 1e-15


@given(st.floats(1e-4, 0.6))
def test_weights_are_those_that_were_written_down(limit):
    for best in (0.0, limit / 2):
        assert weights_below(limit, best).tolist() == pytest.approx(
            oracles.weights(oracles.NEG, limit, best)
        )
        assert weights_above(limit, best).tolist() == pytest.approx(
            oracles.weights(oracles.POS, limit, best)
        )


def test_without_a_limit_before_the_data_all_bets_are_equal():
    for limit in (None, 0.0, 1.0, 1.5):
        assert set(weights_below(limit).tolist()) == {1 / len(NEG)}
        assert set(weights_above(limit).tolist()) == {1 / len(POS)}
    assert set(weights_below(0.1, best=0.1).tolist()) == {1 / len(NEG)}


@pytest.mark.parametrize("mean", [0.003, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("limit", [0.003, 0.05, 0.3, 0.9])
def test_under_the_limit_the_mean_of_the_mixture_is_at_most_1(mean, limit):
    """Every outcome of eight units enumerated; the weights need not be those of the true mean."""
    below = above = 0.0
    for xs in itertools.product([0.0, 1.0], repeat=8):
        chance = math.prod(mean if x else 1 - mean for x in xs)
        process = LogMoment.of(np.array(xs))
        below += chance * math.exp(process.log_e_below(mean, weights_below(limit)))
        above += chance * math.exp(process.log_e_above(mean, weights_above(limit)))
    assert below == pytest.approx(1.0, abs=1e-8)
    assert above == pytest.approx(1.0, abs=1e-6)


def test_under_the_limit_the_mean_over_groups_is_at_most_1():
    """Groups of one token that is 1 or of three that are 0, whose ratio is 1 / 4."""
    mean, below, above = 0.25, 0.0, 0.0
    for groups_ in itertools.product([[1.0], [0.0, 0.0, 0.0]], repeat=8):
        process = ratio(groups_, capacity=4)
        below += math.exp(process.log_e_below(mean, weights_below(0.1))) / 2**8
        above += math.exp(process.log_e_above(mean, weights_above(0.1))) / 2**8
    assert below == pytest.approx(1.0, abs=1e-8) and above == pytest.approx(1.0, abs=1e-6)


def processes(xss) -> tuple[LogMoment, GroupRatio]:
    return LogMoment.of(np.array([x for xs in xss for x in xs])), ratio(xss)


@given(groups, limits, limits, limits)
def test_evidence_is_monotone_in_the_mean_at_the_weights_of_one_limit(xss, a, b, limit):
    low, high = sorted((a, b))
    below, above = weights_below(limit), weights_above(limit)
    for process in processes(xss):
        assert process.log_e_below(low, below) <= process.log_e_below(high, below) + 1e-9
        assert process.log_e_above(low, above) >= process.log_e_above(high, above) - 1e-9


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.02, 1.0]), min_size=1, max_size=6), min_size=1, max_size=12
    ),
    st.integers(1, 40),
    limits,
    st.sampled_from([0.05, 0.3, 0.9]),
)
def test_the_interval_excludes_the_limit_where_the_decision_does(xss, times, limit, alpha):
    price = math.log(1 / alpha)
    for process in processes(xss * times):
        low, high = interval(process, alpha, limit)
        below = process.log_e_below(limit, weights_below(limit))
        above = process.log_e_above(limit, weights_above(limit))
        hair = 2e-5 * limit + 2e-9  # of the bisection, which ends on the safe side
        if high <= limit:
            assert below >= price - 1e-9
        if high > limit + hair:
            assert below < price
        if low >= limit:
            assert above >= price - 1e-9
        if low < limit - hair:
            assert above < price
        assert not (below >= price and above >= price)


@given(streams, limits)
def test_an_end_of_the_interval_is_at_least_the_mean_of_identical_units(xs, limit):
    process = LogMoment.of(np.array(xs))
    low, high = interval(process, 0.05, limit)
    assert low <= process.mean + 1e-9 and process.mean <= high + 1e-9


@pytest.mark.parametrize("limit", [0.001, 0.01, 0.1, 0.3])
@pytest.mark.parametrize(("times", "most"), [(0.0, 0.9), (0.5, 0.9), (0.8, 0.9), (2.0, 0.86)])
def test_fewer_units_decide_than_with_equal_weights(limit, times, most):
    """All or nothing: 11 to 19 % fewer for `holds`, a seventh and more for `violated`."""
    truth, price = times * limit, math.log(40)
    bets, weigh = (NEG, weights_below) if times < 1 else (POS, weights_above)
    growth = truth * np.log1p(bets) - np.log1p(bets * limit)
    found, equal = (units_to_decide(growth, of, 1, price) for of in (weigh(limit), weigh()))
    assert found <= most * equal


@pytest.mark.parametrize("limit", [0.01, 0.05])
@pytest.mark.parametrize(("times", "most"), [(1.25, 1.0), (2.0, 1.2)])
def test_values_of_small_variance_are_violated_nearly_as_soon_as_by_grid_kelly(limit, times, most):
    """Total variation of normal log ratios, against 20 equal bets 1 + c (x - limit)."""
    x = np.maximum(np.random.default_rng(4).normal(size=50_000), 0.0)
    x *= times * limit / x.mean()
    growth = np.log1p(POS[:, None] * x).mean(axis=1) - np.log1p(POS * limit)
    bets = np.linspace(0, 1 / limit, 22)[1:-1]
    kelly = np.log1p(bets[:, None] * (x - limit)).mean(axis=1)
    ours = units_to_decide(growth, weights_above(limit), 1, math.log(40))
    assert ours <= most * units_to_decide(kelly, np.full(20, 1 / 20), 1, math.log(40))


@pytest.mark.parametrize("limit", [0.001, 0.01, 0.1, 0.3])
def test_nearly_constant_values_need_at_most_two_fifths_more(limit):
    growth = np.log1p(POS * 2 * limit) - np.log1p(POS * limit)
    price = math.log(40)
    few = units_to_decide(growth, weights_above(), 1, price)
    found = units_to_decide(growth, weights_above(limit), 1, price)
    assert few is not None and found is not None and few < found <= 1.4 * few


@given(st.lists(st.floats(-2000, 2000), min_size=16, max_size=16), limits)
def test_the_mixture_is_what_it_is_by_definition(growth, limit):
    weight = weights_below(limit)
    expected = oracles.mixed(growth, weight.tolist())
    assert mixed(np.array(growth), weight) == pytest.approx(expected, abs=1e-9)
