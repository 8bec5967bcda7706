# What lint says of the check on the split of users.

import pytest

from tests.judgement.lint.test_chain import problems

CANARY = "promotion: {offline: {}, canary: {}}"
NOWHERE = (
    "sample_ratio is judged where traffic is split between stable and infer, at canary and full, "
    "and this clause is judged at neither"
)


@pytest.mark.parametrize(
    ("clause", "found"),
    [
        ("", [(NOWHERE, "add promotion.canary, and write {id: split, metric: sample_ratio, stages: "
               "[canary, full]}")]),
        (", at_most: 1", [("sample_ratio is at most 1: it is always at most 1",
                           "write a share, such as 0.02")]),
        (", at_least: 0.5", [("sample_ratio takes at_most", "write at_most: 0.02")]),
    ],
)  # fmt: skip
def test_a_split_that_is_never_judged_or_cannot_fail_is_an_error(clause, found):
    assert set(found) <= set(problems(f"metric: sample_ratio{clause}", "", "observability"))
