# The certificate: its algebra against the product written out, its promise by simulation.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import NEG, POS, weights_above, weights_below
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.interval import interval, units_at_best, units_to_decide
from servanda.theory.stats.log_moment import LogMoment
from tests import oracles

units = st.floats(0, 1)
streams = st.lists(units, min_size=1, max_size=40)
groups = st.lists(st.lists(units, min_size=1, max_size=6), min_size=1, max_size=12)
limits = st.floats(1e-4, 0.99)


def ratio(xss, capacity=6, missing=0):
    return GroupRatio(
        capacity,
        len(xss),
        np.array([math.fsum(xs) for xs in xss]),
        np.array([len(xs) for xs in xss]),
        np.full(len(xss), missing),
    )


@given(streams, groups, limits)
def test_evidence_is_the_mean_of_products(xs, xss, limit):
    for process, oracle in (
        (LogMoment.of(np.array(xs)), lambda t: oracles.log_moment_e(xs, t, limit)),
        (ratio(xss), lambda t: oracles.group_ratio_e(xss, t, limit, 6)),
    ):
        below, above = ([math.log(oracle(t)) for t in bets] for bets in (NEG, POS))
        assert process.log_e_below(limit) == pytest.approx(oracles.log_mean_exp(below), abs=1e-8)
        assert process.log_e_above(limit) == pytest.approx(oracles.log_mean_exp(above), abs=1e-8)


@given(groups, limits, limits)
def test_evidence_is_monotone_in_the_limit(xss, a, b):
    low, high = sorted((a, b))
    for process in (ratio(xss), LogMoment.of(np.array([x for xs in xss for x in xs]))):
        assert process.log_e_below(low) <= process.log_e_below(high) + 1e-9
        assert process.log_e_above(low) >= process.log_e_above(high) - 1e-9


@given(st.lists(streams, min_size=2, max_size=5), st.randoms())
def test_merging_rounds_is_exact_and_free_of_order(rounds, random):
    parts = [LogMoment.of(np.array(xs)) for xs in rounds]
    forward = sum(parts, LogMoment())
    random.shuffle(parts)
    shuffled = sum(parts, LogMoment())
    assert (forward.n, forward.below, forward.above) == (
        shuffled.n,
        shuffled.below,
        shuffled.above,
    )


@given(groups, limits)
def test_missing_counts_against_both_answers(xss, limit):
    whole = ratio(xss, capacity=7)
    holed = ratio(xss, capacity=7, missing=1)
    assert holed.log_e_below(limit) <= whole.log_e_below(limit) + 1e-9
    assert holed.log_e_above(limit) <= whole.log_e_above(limit) + 1e-9
    xs = np.array([x for xs in xss for x in xs])
    assert LogMoment.of(xs, missing=3).log_e_below(limit) == pytest.approx(
        LogMoment.of(np.concatenate([xs, np.ones(3)])).log_e_below(limit), abs=1e-8
    )
    assert LogMoment.of(xs, missing=3).log_e_above(limit) == pytest.approx(
        LogMoment.of(np.concatenate([xs, np.zeros(3)])).log_e_above(limit), abs=1e-8
    )


@given(groups)
def test_the_interval_holds_the_mean_and_is_where_evidence_pays(xss):
    for process in (ratio(xss), LogMoment.of(np.array([x for xs in xss for x in xs]))):
        low, high = interval(process, 0.05)
        assert low <= process.mean + 1e-9 and process.mean <= high + 1e-9
        if high < 1:
            assert process.log_e_below(high) >= math.log(20)
            assert process.log_e_below(high * 0.999 - 1e-8) < math.log(20) + 0.1
        if low > 0:
            assert process.log_e_above(low) >= math.log(20)


@pytest.mark.parametrize("x", [-1e-9, 1.0000001, math.nan])
def test_a_value_the_proof_does_not_cover_is_refused(x):
    with pytest.raises(EvidenceError, match="must lie in"):
        LogMoment.of(np.array([0.5, x]))


def test_sums_beyond_64_bits_are_still_numbers():
    one = LogMoment.of(np.full(1000, 0.5))
    many = one
    for _ in range(20):
        many = many + many  # a thousand million tokens
    assert many.n == 1000 << 20
    assert many.log_e_above(0.4) > many.log_e_above(0.45) > 1e5
    assert many.log_e_below(0.6) > 1e5


def test_rounds_of_one_plan_merge_and_those_of_two_do_not():
    one, other = ratio([[0.1], [0.2, 0.9]]), ratio([[0.4] * 3], missing=2)
    assert GroupRatio.join(6, [one, other]) == GroupRatio(
        6, 3, np.array([0.1, 1.1, 1.2000000000000002]), np.array([1, 2, 3]), np.array([0, 0, 2])
    )
    for capacity, parts in ((6, [one, ratio([[0.1]], capacity=7)]), (7, [one, other])):
        with pytest.raises(EvidenceError, match="two plans"):
            GroupRatio.join(capacity, parts)


@given(groups, groups)
def test_groups_are_equal_where_every_digit_of_them_is(xss, others):
    one, other = ratio(xss), ratio(others)
    assert one == ratio(xss) and hash(one) == hash(ratio(xss))
    assert (one == other) == (
        (one.total_G.tolist(), one.tokens_G.tolist())
        == (other.total_G.tolist(), other.tokens_G.tolist())
    )


def test_units_without_a_value_are_no_part_of_the_mean():
    for process in (LogMoment.of(np.array([0.2, 0.4]), missing=3), ratio([[0.2, 0.4]], missing=3)):
        assert (process.known, process.missing) == (2, 3)
        assert process.mean == pytest.approx(0.3)
    assert math.isnan(LogMoment.of(np.zeros(0), missing=3).mean)


def test_the_projection_is_the_number_that_decides():
    """A stream that goes on as it began is decided exactly where the projection says."""
    xs = np.full(50, 0.01)
    for limit, side, weight, price in [
        (0.02, "below", weights_below(0.02), math.log(20)),
        (0.009, "above", weights_above(0.009), math.log(400)),
        (0.009, "above", weights_above(), math.log(400)),
    ]:
        growth = getattr(LogMoment.of(xs), f"{side}_growth")(limit)
        n = units_to_decide(growth, weight, 50, price)
        log_e = f"log_e_{side}"
        assert getattr(LogMoment.of(np.full(n, 0.01)), log_e)(limit, weight) >= price - 1e-6
        assert getattr(LogMoment.of(np.full(n - 1, 0.01)), log_e)(limit, weight) < price
    growth = LogMoment.of(xs).below_growth(0.009)
    assert units_to_decide(growth, weights_below(0.009), 50, math.log(20)) is None


def test_the_least_number_of_units_is_that_of_identical_kernels():
    n, weight = units_at_best(0.02, 0.05), weights_below(0.02)
    assert LogMoment.of(np.zeros(n)).log_e_below(0.02, weight) >= math.log(20)
    assert LogMoment.of(np.zeros(n - 1)).log_e_below(0.02, weight) < math.log(20)
    assert units_at_best(0.0, 0.05) is None
