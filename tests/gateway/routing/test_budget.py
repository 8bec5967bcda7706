# Train's time goes where a decision is near, and no further than it reaches.

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.routing.snapshot import LEAST, samples
from servanda.gateway.routing.state_machine import begin
from tests.gateway.routing.made import cell, fed, looked, quarantined, recovering, rules

RULES = rules(cell("code"), cell("chat"), cell("maths"), enter_evidence=100)
CALM = begin(RULES, now=0.0)
SUSPECT = looked(RULES, fed(RULES, CALM, 1.0, 4), 1.0)


def spent(rule, shares, rates, cost_s):
    """Seconds of train a second, where every request lies in the whole and one slice of it."""
    inside = {n: r for n, r in rates.items() if n != "all"}
    rest = rates["all"] - math.fsum(inside.values())
    scored = math.fsum(r * max(shares[n], shares["all"]) for n, r in inside.items())
    return (scored + rest * shares["all"]) * cost_s


def test_while_all_is_well_everything_has_the_base_share():
    assert samples(RULES, CALM, rates={"all": 1.0}, cost_s=0.1) == dict.fromkeys(
        ("code", "chat", "maths", "all"), 0.01
    )


def test_where_a_decision_is_near_more_is_scored():
    shares = samples(RULES, SUSPECT, rates={"all": 1.0, "code": 0.2}, cost_s=0.1)

    assert shares == {"code": 0.2, "chat": 0.01, "maths": 0.01, "all": 0.01}


def test_a_slice_on_its_way_back_is_watched_closely_and_one_that_only_waits_is_not():
    rule = rules()
    waits = quarantined(rule, begin(rule, now=0.0), 1.0)
    probation = looked(rule, waits, 101.0)
    back = recovering(rule, begin(rule, now=0.0), 1.0)

    found = [samples(rule, s, rates={}, cost_s=1.0)["code"] for s in (waits, probation, back)]

    assert found == [0.01, 0.2, 0.2]


def test_what_is_decided_and_held_needs_no_more_evidence():
    held = looked(RULES, fed(RULES, CALM, 1.0), 1.0, stable_in_flight=None)

    assert samples(RULES, held, rates={}, cost_s=1.0)["code"] == 0.01


def test_near_decisions_are_served_first_where_there_is_not_enough():
    """Half a second a second, at a second each: half a request a second."""
    rates = {"all": 100.0, "code": 2.0, "chat": 50.0}

    shares = samples(RULES, SUSPECT, rates=rates, cost_s=1.0)

    assert shares["code"] == pytest.approx(0.2)
    assert LEAST < shares["all"] < 0.01
    assert shares["chat"] == shares["all"]
    assert spent(RULES, shares, rates, 1.0) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("cost_s", [0.0, math.nan])
def test_before_anybody_knows_what_scoring_costs_it_costs_nothing(cost_s):
    assert samples(RULES, SUSPECT, rates={"all": 1e9}, cost_s=cost_s)["code"] == 0.2


@given(
    st.sampled_from([CALM, SUSPECT]),
    st.lists(st.floats(0, 1000), min_size=3, max_size=3),
    st.floats(0, 1000),
    st.floats(1e-3, 100),
)
def test_the_budget_is_kept_but_for_the_least(state, inside, rest, cost_s):
    rates = dict(zip(("code", "chat", "maths"), inside, strict=True))
    rates["all"] = math.fsum(inside) + rest

    shares = samples(RULES, state, rates=rates, cost_s=cost_s)

    least = rates["all"] * LEAST * cost_s
    assert spent(RULES, shares, rates, cost_s) <= max(0.5, least) * (1 + 1e-9)
    assert all(LEAST <= share <= 1.0 for share in shares.values())
    assert all(share >= shares["all"] for share in shares.values())
