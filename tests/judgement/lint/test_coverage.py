# What lint says of the guard on how much is scored again.

import pytest

from tests.judgement.lint.test_chain import problems


@pytest.mark.parametrize("more", ["", ", over: 1h", ", slices: all", ", stages: [shadow]"])
def test_a_coverage_that_can_be_kept_and_broken_is_no_error(more):
    found = problems(f"metric: scoring_rate, at_least: 0.005{more}", "", "observability")

    assert [m for m, _ in found if "promotion does not have" not in m] == []


@pytest.mark.parametrize(
    ("clause", "message", "hint"),
    [
        ("", "clause 'c' has no limit", "add at_least: 0.005"),
        (", at_most: 0.5", "scoring_rate takes at_least", "write at_least: 0.005"),
        (
            ", at_least: 1.5",
            "scoring_rate is at most 1: it can never be at least 1.5",
            "write a share, such as 0.005",
        ),
        (
            ", at_least: 0",
            "scoring_rate is always at least 0: the clause can never fail",
            "write a share, such as 0.005",
        ),
        (", at_least: 0.1, aggregate: mean", "scoring_rate takes no aggregate", "remove it"),
        (
            ", at_least: 0.1, slices: depth",
            "scoring_rate is counted on the whole",
            "remove slices: how much of each was served is not in the log",
        ),
    ],
)
def test_a_coverage_that_says_nothing_is_an_error(clause, message, hint):
    assert problems(f"metric: scoring_rate{clause}", "", "observability") == [(message, hint)]


@pytest.mark.parametrize(
    ("clause", "message", "hint"),
    [
        (
            "metric: tv, aggregate: mean, at_most: 0.1, over: 1h",
            "tv covers all that was measured",
            "remove over: the evidence is cumulative, and valid at every evaluation",
        ),
        (
            "metric: scoring_rate, at_least: 0.1",
            "scoring_rate is a validity check, a precondition of the promises in statistical",
            "move the clause to observability.clauses",
        ),
        (
            "metric: weight_mean_check",
            "weight_mean_check is a validity check, a precondition of the promises in statistical",
            "move the clause to observability.clauses",
        ),
    ],
)
def test_a_promise_is_no_matter_of_an_hour_and_a_validity_check_is_none(clause, message, hint):
    assert problems(clause) == [(message, hint)]
