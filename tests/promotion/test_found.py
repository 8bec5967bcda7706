# What a verdict says to a promotion.

from dataclasses import replace

import pytest

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
from servanda.promotion.api import leg_finding
from servanda.promotion.state import CellResult, RuleAction
from tests.judgement.lint.test_stages import CONTRACT
from tests.kit import parse
from tests.promotion.made import KEY, OFFLINE, SHADOW

RULES = """\
escalation:
  - {when: {clause: tv, is: violated}, do: [roll_back, {page: oncall}, {mirror: 0.5}]}
  - {when: {section: statistical, is_not: holds}, do: [hold, {divert: all}, {sample: 0.1}]}
  - {when: {diverted_traffic: {gte: 0.3}}, do: [halt, {page: boss}]}
"""
CONTRACT = parse(CONTRACT + RULES, "x.yaml", engines=["table"])[0]


def cell(outcome, clause="tv", slice="all", section="statistical", **more):
    said = {"metric": "tv", "aggregate": "mean", "kind": "certificate", "value": 0.01}
    said |= {"interval": (0.002, 0.03), "limit": 0.05, "n": 70, "units": "tokens", "note": "so"}
    return CellVerdict(clause, section, slice=slice, outcome=outcome, **{**said, **more})


def verdict(*cells, groups=300):
    return Verdict(
        outcome="holds",
        cells=cells,
        contract="small",
        stage="offline",
        key=KEY,
        evidence="digest",
        confidence=0.95,
        alpha=0.05,
        price_cells=1,
        groups=groups,
        sequences=groups,
        tokens=groups,
        lost=0,
    )


def test_a_finding_carries_the_numbers_the_key_and_the_digest():
    look = leg_finding(CONTRACT, SHADOW, verdict(cell("holds")))

    assert (look.leg, look.key, look.groups, look.evidence) == ("shadow", KEY, 300, "digest")
    assert look.cells == (
        CellResult("tv", "all", "holds", 0.01, 0.002, 0.03, 0.05, 70, "tokens", "so", False),
    )
    assert (look.asked, look.error) == ((), "")


def test_what_is_only_shown_does_not_count():
    shown = (
        cell("violated", "watched", enforced=False),
        cell("not applicable", "later"),
        cell("holds"),
    )

    assert [c.clause for c in leg_finding(CONTRACT, OFFLINE, verdict(*shown)).cells] == ["tv"]


def test_a_precondition_is_known_as_one():
    look = leg_finding(CONTRACT, OFFLINE, verdict(cell("holds", "finite", section="observability")))

    assert [c.guard for c in look.cells] == [True]


def test_a_limit_from_below_is_known_as_one():
    seen = verdict(cell("holds"), cell("holds", "usable_ratio", metric="usable_ratio"))

    assert [c.at_least for c in leg_finding(CONTRACT, OFFLINE, seen).cells] == [False, True]


def test_where_nothing_was_computed_nothing_is_made_up():
    empty = cell("inconclusive", value=None, interval=None, limit=None, n=0)

    (only,) = leg_finding(CONTRACT, OFFLINE, verdict(empty)).cells

    assert (only.value, only.low, only.high, only.limit, only.n) == (None, None, None, None, 0)


def test_rules_ask_for_what_a_promotion_does_by_the_cells_that_meet_them():
    """What a gateway does is not asked of a promotion, nor what the traffic is."""
    broken, fine = cell("violated"), cell("holds", slice="code")

    look = leg_finding(CONTRACT, OFFLINE, verdict(broken, fine))

    by = (CellResult.of(broken),)
    assert look.asked == (
        RuleAction("roll_back", "", by, "tv is violated"),
        RuleAction("page", "oncall", by, "tv is violated"),
        RuleAction("hold", "", by, "statistical is not holds"),
    )
    assert [str(one) for one in look.asked] == [
        "roll_back, for tv is violated",
        "page: oncall, for tv is violated",
        "hold, for statistical is not holds",
    ]


@pytest.mark.parametrize(("groups", "asks"), [(1, False), (2, True)])
def test_that_everything_is_undecided_before_the_first_look_is_no_news(groups, asks):
    look = leg_finding(CONTRACT, OFFLINE, verdict(cell("inconclusive"), groups=groups))

    assert bool(look.asked) is asks


@pytest.mark.parametrize("outcome", ["violated", "error"])
def test_what_is_bad_is_news_at_any_size(outcome):
    look = leg_finding(CONTRACT, OFFLINE, verdict(cell(outcome), cell("inconclusive"), groups=1))

    assert "hold" in [one.action for one in look.asked]


def test_a_rule_about_a_clause_hears_it_though_it_is_not_enforced():
    watched = cell("violated", enforced=False)

    look = leg_finding(CONTRACT, OFFLINE, verdict(watched))

    assert look.cells == ()
    assert [one.action for one in look.asked] == ["roll_back", "page"]


def test_a_finding_says_nothing_of_the_leg_but_its_name():
    one = leg_finding(CONTRACT, OFFLINE, verdict(cell("holds")))

    assert replace(one, leg="shadow") == leg_finding(CONTRACT, SHADOW, verdict(cell("holds")))
