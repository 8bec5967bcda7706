# A verdict is wrong no more often than it promises: 500 seeded runs of `check` a case.

import pytest
from benchmarks import truth


@pytest.fixture(scope="module")
def pool():
    with truth.workers() as workers:
        yield workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "claim", "ratio"),
    truth.cases(),
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_wrong_answers_are_no_more_frequent_than_alpha(pool, scenario, claim, ratio):
    row = truth.simulate(pool, scenario, claim, ratio)
    truth.record(row)
    assert row.runs >= 500 and row.wrong / row.runs <= row.allowed
    # and the gate is of use: far from the limit it answers, and rightly
    if scenario.name == "plain" and ratio in (0.5, 2.0):
        assert row.answers.get("holds" if ratio < 1 else "violated", 0) / row.runs > 0.95
