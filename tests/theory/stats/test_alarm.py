# The alarm: its recursion against the sum over all beginnings, its promise by enumeration.

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from benchmarks.theory.change_point import ShiryaevRoberts
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.stats.log_moment import LogMoment
from tests.oracles import POS

rounds = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=6)
limits = st.floats(1e-4, 0.9)


def watch(alarm, streams):
    for xs in streams:
        alarm = alarm.after(LogMoment.of(np.array(xs, dtype=float)))
    return alarm


def over_all_beginnings(streams, limit):
    """mean over the bets of: sum over beginnings k of the evidence since round k, in Fractions."""
    total = Fraction(0)
    for bet in map(Fraction, POS):
        for first in range(len(streams)):
            e = Fraction(1)
            for x in itertools.chain.from_iterable(streams[first:]):
                e *= (1 + bet * Fraction(x)) / (1 + bet * Fraction(limit))
            total += e
    return total / len(POS)


@pytest.mark.slow
@given(rounds, limits)
def test_it_is_the_evidence_summed_over_every_round_at_which_it_may_have_begun(streams, limit):
    alarm = watch(ShiryaevRoberts(limit, 1e9), streams)
    expected = over_all_beginnings(streams, limit)
    assert alarm.log_mean == pytest.approx(
        math.log(expected.numerator) - math.log(expected.denominator), abs=1e-8
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", [0.5, 0.1])
def test_without_a_change_the_mean_of_it_is_the_number_of_rounds(limit):
    """Every sequence of ten rounds of one unit, whose mean is the limit, by its chance."""
    expected = 0.0
    for xs in itertools.product([0.0, 1.0], repeat=10):
        chance = math.prod(limit if x else 1 - limit for x in xs)
        expected += chance * math.exp(watch(ShiryaevRoberts(limit, 1e9), zip(xs)).log_mean)
    assert expected == pytest.approx(10, rel=1e-8)


@pytest.mark.parametrize("threshold", [5, 8])
def test_the_rounds_to_a_false_alarm_are_the_threshold_or_more_on_average(threshold):
    """Enumerated to 14 rounds of one unit; whatever has not rung by then counts as 14."""
    limit, most, expected = 0.3, 14, 0.0

    def follow(alarm, chance):
        nonlocal expected
        if alarm.fires or alarm.rounds == most:
            expected += chance * alarm.rounds
            return
        follow(watch(alarm, [[1.0]]), chance * limit)
        follow(watch(alarm, [[0.0]]), chance * (1 - limit))

    follow(ShiryaevRoberts(limit, threshold), 1.0)
    assert expected >= threshold


def test_a_million_good_units_do_not_mask_a_regression():
    rng = np.random.default_rng(3)
    good = [LogMoment.of((rng.random(10_000) < 0.05).astype(float)) for _ in range(100)]
    bad = [LogMoment.of((rng.random(500) < 0.2).astype(float)) for _ in range(4)]
    alarm, memory = ShiryaevRoberts(0.1, 1e4), sum(good, LogMoment())
    for one in good:
        alarm = alarm.after(one)
        assert not alarm.fires
    for one in bad:
        alarm, memory = alarm.after(one), memory + one
    assert alarm.fires
    assert memory.log_e_above(0.1) < 0


def test_no_evidence_is_too_much_to_be_written_down():
    alarm = ShiryaevRoberts(1e-3, 1e6)
    for _ in range(50):
        alarm = alarm.after(LogMoment.of(np.ones(100)))
    assert math.isfinite(alarm.log_mean) and alarm.log_mean > 1e4 and alarm.fires
    for _ in range(50):
        alarm = alarm.after(LogMoment.of(np.zeros(100_000)))
    assert all(map(math.isfinite, alarm.log_s))
    assert not alarm.fires


@given(rounds, st.integers(1, 5))
def test_a_lost_unit_does_not_ring_it(streams, lost):
    whole = watch(ShiryaevRoberts(0.1, 100), streams)
    holed = ShiryaevRoberts(0.1, 100)
    for xs in streams:
        holed = holed.after(LogMoment.of(np.array(xs), missing=lost))
    assert holed.log_mean <= whole.log_mean


def test_before_the_first_round_and_without_a_unit_it_says_nothing():
    alarm = ShiryaevRoberts(0.1, 100)
    assert alarm.log_mean == -math.inf and not alarm.fires
    assert alarm.after(LogMoment()) == alarm


def test_it_is_not_merged():
    with pytest.raises(TypeError):
        ShiryaevRoberts(0.1, 100) + ShiryaevRoberts(0.1, 100)


@pytest.mark.parametrize("limit", [-0.1, 1.1, math.nan])
def test_a_limit_outside_the_unit_interval_is_refused(limit):
    with pytest.raises(EvidenceError, match=r"an alarm needs a limit in \[0, 1\], found"):
        ShiryaevRoberts(limit, 100)


@pytest.mark.parametrize("threshold", [1, 0, math.nan])
def test_a_threshold_that_the_first_round_reaches_is_refused(threshold):
    with pytest.raises(EvidenceError, match="rounds would fire by itself\n  hint: the threshold"):
        ShiryaevRoberts(0.1, threshold)
