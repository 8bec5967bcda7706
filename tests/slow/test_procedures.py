# Ours keep their promise and the habits break it: 2,000 seeded runs of every scenario.

import pytest
from benchmarks.theory import SCENARIOS, simulate


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*SCENARIOS])
def test_ours_are_within_alpha_and_every_habit_is_beyond_it(scenario):
    for row in simulate(scenario, 2000):
        assert row.beyond is not row.ours, row
