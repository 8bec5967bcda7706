"""Change against good runs: at most one of some runs differs from all others."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.stats.change import (
    ALLOWANCE,
    CLIP,
    Detector,
    Fold,
    detector,
    least_threshold,
)

LEAST = 1e-3


def changed(of: Detector, run) -> list[int]:
    """The steps at which a run is called changed."""
    state, found = of.start(), []
    for t, x in enumerate(run):
        state = of.advance(state, x)
        if (of.values(state) > 1).any():
            found.append(t)
    return found


def fit(runs, sides=(1,), alpha=0.05):
    return detector(runs, sides, [LEAST] * len(sides), alpha)


numbers = st.floats(-50, 50, allow_nan=False) | st.sampled_from([0.0, 1.0, 1e6])


@given(st.data(), st.integers(3, 5), st.sampled_from([(1,), (0,), (1, -1)]))
def test_at_most_one_run_differs_from_all_others(data, runs, sides):
    """The law behind 1 / (R + 1): of any R + 1 runs, no matter how they came about."""
    size = data.draw(st.integers(5, 7))
    step = st.lists(numbers, min_size=len(sides), max_size=len(sides))
    series = [data.draw(st.lists(step, min_size=size, max_size=size)) for _ in range(runs)]

    found = [
        bool(changed(fit(series[:j] + series[j + 1 :], sides), series[j])) for j in range(runs)
    ]

    assert sum(found) <= 1


def test_the_bound_is_reached_by_a_run_that_is_above_all_others():
    healthy = [[[0.0], [1.0], [0.0], [1.0], [0.0], [1.0]] for _ in range(3)]
    other = [[9.0]] * 6

    assert fit(healthy).false_alarms == 1 / 4
    assert changed(fit(healthy), other)[0] <= fit(healthy).delay() - 1
    assert not changed(fit([*healthy[:2], other]), healthy[2])


def test_a_step_is_the_definition_of_page():
    """Against a sum written out: centre 2, scale 0.5, one step clipped, one not measured."""
    of = Detector((Fold((2.0,), (0.5,), 3.0),), (1,), 2, 6)
    xs = [2.25, 3.0, math.nan, 50.0, 1.0, -math.inf]
    by_hand = [0.0, 1.0, 1.0, 4.0, 1.0, 0.0]  # z: .5, 2, -, clipped at 4, -2, -inf

    state, found = of.start(), []
    for x in xs:
        state = of.advance(state, [x])
        found.append(float(state[0, 0, 0]))

    assert (ALLOWANCE, CLIP) == (1, 4)
    assert found == by_hand
    assert state[0, 1, 0] == 0  # downwards is not watched


def test_an_infinite_value_counts_as_one_clipped_step():
    of = Detector((Fold((0.0,), (1.0,), 9.0),), (0,), 2, 6)
    assert of.advance(of.start(), [math.inf]).max() == CLIP - ALLOWANCE
    assert of.advance(of.start(), [-math.inf])[0].tolist() == [[0.0], [CLIP - ALLOWANCE]]


def test_a_repaired_run_recovers():
    of = fit([[[0.0], [1.0]] * 4] * 3)
    found = changed(of, [*[[100.0]] * 200, *[[0.0]] * 10])
    assert found[0] < of.delay() and 200 <= found[-1] < 209


def test_the_threshold_is_the_margin_above_the_good_run():
    quiet, loud = [[0.0], [1.0]] * 5, [[3.0], [3.0], [3.0], [0.0], [1.0]] * 2
    loudest = max(fold.threshold for fold in fit([quiet, quiet, loud]).folds)
    centre, scale = 0.5, np.std([0, 1] * 10, ddof=1)
    s = most = 0.0
    for (x,) in loud:
        s = max(0.0, s + min((x - centre) / scale, CLIP) - ALLOWANCE)
        most = max(most, s)
    assert loudest == pytest.approx(1.2 * most)


def test_one_run_promises_nothing():
    of = fit([[[0.0], [1.0]] * 5])
    assert of.false_alarms is None and len(of.folds) == 2
    assert changed(of, [[9.0]] * 9)


@pytest.mark.parametrize("runs", [[], [[[0.0]] * 4], [[[0.0]] * 9, [[math.nan]] * 9]])
def test_too_little_is_refused(runs):
    with pytest.raises(EvidenceError, match="5 steps with a value of every metric"):
        fit(runs)


def walk(rng, runs, steps, alarm):
    """The first step at which a CUSUM of normal steps exceeds a threshold, of each run."""
    s, first = np.zeros(runs), np.full(runs, steps)
    for t in range(steps):
        s = np.maximum(s + np.minimum(rng.normal(size=runs), CLIP) - ALLOWANCE, 0)
        first = np.where((s > alarm) & (first == steps), t, first)
    return first


def test_the_least_threshold_has_the_run_length_that_it_states():
    """By simulation, seed 1: independent normal steps."""
    rng = np.random.default_rng(1)
    length = walk(rng, 4000, 3000, least_threshold(30, 0.1)).mean()
    assert 300 * 0.85 < length < 300 * 1.25
    thresholds = [least_threshold(steps, 0.05) for steps in (10, 100, 1000)]
    assert all(low < high for low, high in pairwise(thresholds))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_correlated_heavy_tailed_runs_keep_the_promise(correlation):
    """By simulation, seed 2: AR(1) steps with t(3) innovations, and a level of each run's own."""
    rng = np.random.default_rng(2)

    def run():
        x, xs = rng.standard_t(3), []
        for _ in range(20):
            x = correlation * x + rng.standard_t(3)
            xs.append([x])
        return np.array(xs) + rng.normal()

    found = sum(bool(changed(fit([run() for _ in range(4)]), run())) for _ in range(400))

    spread = 3 * math.sqrt(400 * 0.2 * 0.8)
    assert found <= 400 / 5 + spread
    assert found < 400 / 5  # the margin leaves room


@pytest.mark.parametrize(("sides", "charts"), [((1,), 1), ((1, -1), 2), ((0, 1), 3), ((0, 0), 4)])
def test_charts_share_alpha_and_the_threshold_has_siegmunds_run_length(sides, charts):
    of = fit([[[0.0] * len(sides), [1e-9] * len(sides)] * 5] * 2, sides, alpha=0.08)
    (threshold,) = {fold.threshold for fold in of.folds}
    b = 2 * (threshold + 1.166)
    assert (math.exp(b) - 1 - b) / 2 == pytest.approx(10 * charts / 0.08)
