# Since when a slice is beyond its limit, and whether the drift grows.

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.rl.steps.drift import ENDS, StepDrift, TokenSum, since, trend


@given(st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.2])), max_size=12))
def test_since_is_the_first_step_after_which_none_is_within(values):
    means = list(enumerate(values))

    found = since(means, 0.15)

    beyond = [s for s, m in means if m is not None and m > 0.15]
    wanted = [s for s in beyond if all(m is None or m > 0.15 for t, m in means if t >= s)]
    assert found == (wanted[0] if wanted else None)


def steps(rng, first, n, level, groups=8):
    made = []
    for i in range(n):
        step = StepDrift(first + i)
        for g in range(groups):
            step.groups[str(g)] = TokenSum(float(rng.gamma(20, level / 20) * 50), 50)
        made.append(step)
    return made


@pytest.mark.slow
def test_a_trend_is_the_ratio_of_both_ends_and_its_interval_holds_the_truth():
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        found = trend(steps(rng, 1, ENDS, 0.01), steps(rng, 20, ENDS, 0.02))
        covered += found.interval[0] <= 2 <= found.interval[1]
        assert found.ratio == pytest.approx(2, rel=0.4)
    assert covered >= 88  # of 95 %


def test_too_few_steps_have_no_trend():
    rng = np.random.default_rng(1)
    assert trend(steps(rng, 1, ENDS, 0.01), steps(rng, 20, ENDS - 1, 0.02)) is None
    assert trend(steps(rng, 1, ENDS, 0.0), steps(rng, 20, ENDS, 0.02)) is None


def test_a_step_without_such_a_token_has_no_mean():
    step = StepDrift(1)
    step.add(0, 1.0, 4)
    step.add(0, 1.0, 4)
    assert (step.mean(0), step.mean(1)) == (0.25, None)
