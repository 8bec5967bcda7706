# What `explain` says of a course, and of a contract that goes nowhere.

from servanda.report.explain.contract import explain_course
from tests.promotion.run.histories import TEXT, contract


def test_a_course_is_a_table_of_its_legs_with_the_traffic_that_each_takes():
    text, table = explain_course(contract())

    assert text.endswith("All 5 steps share the chance of a false rollback.")
    assert [line.split("  ")[0] for line in table] == [
        *("step", "offline", "shadow", "canary-1", "canary-2", "full-1")
    ]
    assert [" ".join(line.split()) for line in table[2:5]] == [
        "shadow 5 % mirrored 100 to 400 2,000 undecided: halts",
        "canary-1 10 % 100 to 400 1,000 1m undecided: halts",
        "canary-2 50 % 100 to 400 200 1m an approval; undecided: halts",
    ]


def test_a_contract_that_is_only_checked_has_no_course_to_explain():
    offline = TEXT[: TEXT.index("  shadow:")]

    assert explain_course(contract(offline)) == ("", [])
