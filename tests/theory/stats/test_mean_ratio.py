# Evidence about a ratio of means: against enumeration, direct sums, and simulated runs.

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import log_mean_exp
from servanda.theory.stats.mean_ratio import BETS, MeanRatio, ratios

R = 1.25
UNIT = st.floats(0, 1)


@pytest.mark.parametrize("step", [0, 1], ids=["below", "above"])
def test_no_expected_evidence_where_the_ratio_is_at_the_limit_on_average(step):
    """Every sequence of three dependent units is enumerated; their means differ by turn."""
    values = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]

    def law(earlier):
        """P(x, y) with E x = R E y at each turn; the sizes depend on what was seen."""
        mean_y = 0.2 + 0.1 * sum(y for _, y in earlier)
        mean_x = R * mean_y
        both = min(mean_x, mean_y) * (0.5 if earlier else 0.9)
        return [1 - mean_x - mean_y + both, mean_x - both, mean_y - both, both]

    expected = np.zeros(len(BETS))
    for units in itertools.product(range(4), repeat=3):
        chance = math.prod(law([values[u] for u in units[:i]])[u] for i, u in enumerate(units))
        x, y = np.array([values[u] for u in units]).T
        expected += chance * np.exp(MeanRatio.of_units(x, y, (R,)).growth()[step])
    assert expected == pytest.approx(np.ones(len(BETS)), abs=1e-9)


def test_expected_evidence_is_small_where_the_turns_differ_and_only_their_mean_is_at_the_limit():
    """x alone at the first turn, y alone at the second: the running mean of x - r y is 0."""
    for first in (0.1, 0.4):
        below = above = 0.0
        for x, y in itertools.product((0.0, 1.0), repeat=2):
            chance = (first if x else 1 - first) * (first / R if y else 1 - first / R)
            pairs = MeanRatio.of_units(np.array([x, 0.0]), np.array([0.0, y]), (R,))
            down, up = (np.exp(log_mean_exp(g)) for g in pairs.growth())
            below, above = below + chance * down, above + chance * up
        assert below <= 1 and above <= 1


@given(st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=8), st.integers(0, 3))
def test_growth_is_the_sum_of_logs_and_lost_units_count_against_both(units, missing):
    x, y = np.array(units).T
    found = MeanRatio.of_units(x, y, ratios(R), missing)
    worst = [(1.0, 0.0)] * missing, [(0.0, 1.0)] * missing
    for j, bet in enumerate(BETS):
        below = sum(math.log1p(bet * (R * b - a)) for a, b in [*units, *worst[0]])
        above = sum(math.log1p(bet / R * (a - R * b)) for a, b in [*units, *worst[1]])
        assert found.growth()[0][j] == pytest.approx(below, abs=1e-9)
        assert found.growth()[1][j] == pytest.approx(above, abs=1e-9)


@given(st.lists(st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=4), min_size=2, max_size=4))
def test_rounds_add_up_exactly_in_any_grouping(rounds):
    parts = [MeanRatio.of_units(*np.array(units).T, ratios(R)) for units in rounds]
    left = sum(parts[1:], parts[0])
    right = parts[0] + sum(parts[2:], parts[1])
    assert (left.below, left.above, left.n) == (right.below, right.above, right.n)
    assert left + MeanRatio(ratios(R)) == left == MeanRatio(ratios(R)) + left


@pytest.mark.parametrize("truth, direction", [(1.0, 0), (1.41, 1)])
def test_rounding_noise_decides_within_some_thousand_tokens(truth, direction):
    """Terms as those of bfloat16 in a real model: mean .018, mostly 0."""
    rng = np.random.default_rng(5)
    x = np.maximum(rng.normal(0, 0.045 * truth, 8_000), 0)
    y = np.maximum(rng.normal(0, 0.045, 8_000), 0)
    found = MeanRatio.of_units(x.clip(0, 1), y.clip(0, 1), ratios(R))
    assert log_mean_exp(found.growth()[direction]) > math.log(1 / 0.045)
    low, high = found.interval(0.05)
    assert low < truth < high and (high < R if direction == 0 else low > R)


@pytest.mark.slow
def test_intervals_cover_at_every_look_in_all_but_alpha_of_runs():
    wrong = 0
    for seed in range(100):
        rng, looks = np.random.default_rng(seed), []
        total = MeanRatio(ratios(R))
        for _ in range(10):
            y = rng.exponential(0.02, 100).clip(0, 1)
            x = rng.permutation(y) * 1.1
            total += MeanRatio.of_units(x, y, ratios(R))
            low, high = total.interval(0.1)
            looks.append(low <= 1.1 <= high)
        wrong += not all(looks)
    assert wrong <= 10


def test_values_outside_are_refused():
    with pytest.raises(EvidenceError, match="must lie in"):
        MeanRatio.of_units(np.array([1.2]), np.array([0.1]), (R,))
