# Unequal inclusion: enumerated patterns of what is scored, and the algebra written out.

import itertools
import math

import numpy as np
import pytest
from benchmarks.theory.inverse_probability import ByChance, Unequal
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from tests import oracles
from tests.oracles import NEG, POS

LEAST = 0.25
chances = st.sampled_from([0.25, 0.4, 0.5, 1.0])
units = st.lists(st.tuples(st.floats(0, 1), chances), min_size=1, max_size=12)
limits = st.floats(1e-3, 0.99)

# (chance to be scored, mean of x): x is 1 with its mean as chance, else 0
UNITS = [(0.25, 0.1), (0.5, 0.4), (1.0, 0.2), (0.4, 0.9), (0.25, 0.0)]
MEAN = sum(mean for _, mean in UNITS) / len(UNITS)


def patterns():
    """Every outcome of UNITS: (its chance, values of the scored, their chances)."""
    for fates in itertools.product((None, 0.0, 1.0), repeat=len(UNITS)):
        chance, scored = 1.0, []
        for (pi, mean), x in zip(UNITS, fates, strict=True):
            chance *= 1 - pi if x is None else pi * (mean if x else 1 - mean)
            if x is not None:
                scored.append((x, pi))
        yield chance, [x for x, _ in scored], [pi for _, pi in scored]


def of(scored, served, lost=()):
    return Unequal.of([x for x, _ in scored], [pi for _, pi in scored], served, LEAST, lost)


@given(units, st.integers(0, 5), limits)
def test_it_is_log_moment_of_what_was_scaled(scored, unscored, limit):
    process = of(scored, len(scored) + unscored)
    xs = [LEAST * x / pi for x, pi in scored] + [0.0] * unscored
    below = [math.log(oracles.log_moment_e(xs, t, LEAST * limit)) for t in NEG]
    above = [math.log(oracles.log_moment_e(xs, t, LEAST * limit)) for t in POS]
    assert process.log_e_below(limit) == pytest.approx(oracles.log_mean_exp(below), abs=1e-8)
    assert process.log_e_above(limit) == pytest.approx(oracles.log_mean_exp(above), abs=1e-8)


def test_over_all_patterns_the_estimate_is_the_mean_and_no_bet_pays():
    """The e-value of every bet is at most 1 on average, where the mean is the limit."""
    total, estimate = 0.0, 0.0
    below, above = np.zeros(len(NEG)), np.zeros(len(POS))
    for chance, xs, pis in patterns():
        process = Unequal.of(xs, pis, len(UNITS), LEAST)
        total += chance
        estimate += chance * process.mean
        below += chance * np.exp(process.below_growth(MEAN))
        above += chance * np.exp(process.above_growth(MEAN))
    assert total == pytest.approx(1.0)
    assert estimate == pytest.approx(MEAN)
    assert below.max() <= 1 + 1e-9 and above.max() <= 1 + 1e-9
    assert below.max() > 0.99  # and hardly anything is given away where bets are small


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "parts"])
def test_watched_for_long_they_miss_no_more_often_than_alpha(kind):
    """The chance of a unit depends on the x before it; 100 runs, looked at 20 times."""
    rng, alpha, runs, wrong = np.random.default_rng(5), 0.1, 100, 0
    for _ in range(runs):
        process, means, last, ever = None, [], 0.0, False
        for _ in range(20):
            mean, pi = np.zeros(50), np.zeros(50)
            x = np.zeros(50)
            for i in range(50):
                pi[i] = 0.2 if last else 1.0
                mean[i] = 0.3 if last else 0.1
                last = x[i] = float(rng.random() < mean[i])
            scored = rng.random(50) < pi
            if kind == "one":
                part = Unequal.of(x[scored], pi[scored], 50, 0.2)
            else:
                served = {c: int((pi == c).sum()) for c in (0.2, 1.0)}
                part = ByChance.of(x[scored], pi[scored], served)
            process = part if process is None else process + part
            means += mean.tolist()
            low, high = process.interval(alpha)
            ever |= not low <= np.mean(means) <= high
        wrong += ever
    assert wrong / runs <= 2 * alpha  # alpha for each end


def test_bounds_of_parts_are_right_at_once():
    """Each of them has its share of alpha, and their ends are weighed by what they served."""
    process = ByChance.of(
        [1.0] * 30 + [0.0] * 70 + [1.0] * 40 + [0.0] * 60,
        [0.5] * 100 + [1.0] * 100,
        {0.5: 200, 1.0: 100},
    )
    # at a chance of a half, X' is x where the unit is scored, and its mean is half of x's
    ends = [oracles.bernoulli_ends(30, 200, 0.05 / 2), oracles.bernoulli_ends(40, 100, 0.05 / 2)]
    expected = [2 / 3 * 2 * half + 1 / 3 * whole for half, whole in zip(*ends, strict=True)]
    assert process.interval(0.05) == pytest.approx(expected, rel=2e-4)


def test_very_uneven_chances_are_bounded_better_apart():
    """All of the traffic that matters is scored, and a trickle one unit in a thousand."""
    x = np.zeros(5000)
    pi = np.concatenate([np.full(4995, 1.0), np.full(5, 0.001)])
    one = Unequal.of(x, pi, 10_000, 0.001)
    apart = ByChance.of(x, pi, {1.0: 9_900, 0.001: 100})
    assert one.n == apart.n == 10_000
    assert one.interval(0.05)[1] > 0.4
    assert apart.interval(0.05)[1] < 0.02


@given(st.lists(units, min_size=2, max_size=4), st.randoms())
def test_merging_rounds_is_exact_and_free_of_order(rounds, random):
    served = {0.25: 20, 0.4: 20, 0.5: 20, 1.0: 20}
    ones = [of(scored, 20) for scored in rounds]
    parts = [ByChance.of([x for x, _ in r], [c for _, c in r], served) for r in rounds]
    one, part = sum(ones[1:], ones[0]), sum(parts[1:], parts[0])
    random.shuffle(ones)
    random.shuffle(parts)
    assert sum(ones[1:], ones[0]).moment.below == one.moment.below
    again = sum(parts[1:], parts[0])
    assert [p.moment.above for p in again.parts] == [p.moment.above for p in part.parts]


@given(units, st.lists(chances, min_size=1, max_size=4), limits)
def test_a_lost_unit_counts_against_both_answers(scored, lost, limit):
    process = of(scored, 20, lost)
    ones = of([*scored, *((1.0, pi) for pi in lost)], 20)
    zeros = of([*scored, *((0.0, pi) for pi in lost)], 20)
    assert process.log_e_below(limit) == pytest.approx(ones.log_e_below(limit), abs=1e-8)
    assert process.log_e_above(limit) == pytest.approx(zeros.log_e_above(limit), abs=1e-8)
    assert process.moment.missing == len(lost)


def test_without_a_unit_nothing_is_known():
    assert Unequal(0.5).interval(0.05) == (0.0, 1.0)
    assert math.isnan(Unequal(0.5).mean)
    assert ByChance.of([], [], {0.5: 0}).interval(0.05) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Unequal.of([1.1], [0.5], 1, 0.5), r"must lie in \[0, 1\], found 1.1"),
        (lambda: Unequal.of([0.1], [0.4], 1, 0.5), r"a chance of 0.4, outside \[0.5, 1\]"),
        (lambda: Unequal.of([], [], 1, 0.5, [1.5]), r"a chance of 1.5, outside \[0.5, 1\]"),
        (lambda: Unequal.of([], [], 1, 0.0), r"least chance must lie in \(0, 1\], found 0.0"),
        (lambda: Unequal.of([0.1, 0.2], [0.5], 2, 0.5), "2 values have 1 chances"),
        (lambda: Unequal.of([0.1, 0.2], [0.5, 0.5], 2, 0.5, [1]), "of 2 served units 3 cannot"),
        (lambda: Unequal(0.5) + Unequal(0.4), "of 0.5 or more and of 0.4 or more come from two"),
        (
            lambda: ByChance.of([0.1], [0.4], {0.5: 1}),
            "the plan has no unit with a chance of 0.4",
        ),
        (lambda: ByChance.of([0.1], [], {0.5: 1}), "1 values have 0 chances"),
        (
            lambda: ByChance.of([], [], {0.5: 1}) + ByChance.of([], [], {0.5: 1, 1.0: 1}),
            "1 chances and 2 come from two plans",
        ),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(call, message):
    with pytest.raises(EvidenceError, match=message):
        call()
