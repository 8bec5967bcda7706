# What a person may do to a run, and what is refused.

from dataclasses import replace

import pytest

from servanda.errors import EvidenceError
from servanda.promotion.advance import advance, approve, override, roll_back, route_of
from servanda.promotion.state import Override
from tests.promotion.made import (
    FULL,
    OFFLINE,
    SHADOW,
    T0,
    TEN,
    WHOLE,
    begun,
    brought,
    cell,
    finding,
)

ASKING = (replace(OFFLINE, approval=True), SHADOW, FULL)
ANA = {"actor": "ana", "reason": "seen"}


def awaiting():
    return advance(ASKING, begun(ASKING), finding(OFFLINE, cell()), now=T0)[0]


def waive(clause="tv", slice="all", actor="ana", reason="known", expires=T0 + 60):
    return Override(clause, slice, actor, reason, expires)


def refusal(act):
    with pytest.raises(EvidenceError) as refused:
        act()
    return str(refused.value).splitlines()


def test_a_yes_is_told_and_the_next_look_that_holds_goes_forward():
    state, effects = approve(ASKING, awaiting(), **ANA, now=T0 + 1)

    assert (state.status, state.why, state.approved) == ("running", "ana approved: seen", "offline")
    assert [e.kind for e in effects] == ["notify"]

    after, _ = advance(ASKING, state, finding(OFFLINE, cell()), now=T0 + 2)

    assert (after.leg, after.approved, after.status) == (1, "", "running")


def test_a_yes_carries_nothing_that_does_not_hold():
    state, _ = approve(ASKING, awaiting(), **ANA, now=T0)

    waits, _ = advance(ASKING, state, finding(OFFLINE, cell("inconclusive"), groups=3), now=T0)
    broken, _ = advance(ASKING, state, finding(OFFLINE, cell("violated")), now=T0)

    assert (waits.leg, waits.status) == (0, "awaiting_evidence")
    assert (broken.leg, broken.status) == (0, "rolled_back")


def test_a_yes_that_nobody_awaits_is_refused():
    assert refusal(lambda: approve(ASKING, begun(ASKING), **ANA, now=T0)) == [
        "promotion run does not wait for an approval: it is running (the promotion starts)",
        "  hint: wait until everything holds on the step: an approval is for evidence that is "
        "there",
    ]


def test_a_yes_to_a_run_that_has_ended_is_refused():
    state, _ = advance(ASKING, awaiting(), finding(OFFLINE, cell("violated")), now=T0)

    assert refusal(lambda: approve(ASKING, state, **ANA, now=T0)) == [
        "promotion run does not wait for an approval: it is rolled back (tv on all is violated)",
        "  hint: start another attempt: servanda promote --fresh",
    ]


def test_an_override_lets_a_cell_not_count_until_it_expires():
    state, effects = override(WHOLE, begun(WHOLE), waive(), now=T0)
    assert (state.why, state.status) == ("ana overrode tv on all: known", "running")
    assert [e.kind for e in effects] == ["notify"]
    broken = finding(OFFLINE, cell("violated"), cell(slice="code"), groups=2)

    held, _ = advance(WHOLE, state, broken, now=T0 + 59)
    late, _ = advance(WHOLE, state, broken, now=T0 + 60)

    assert (held.leg, held.overrides) == (1, (waive(),))
    assert (late.status, late.why, late.overrides) == ("rolled_back", "tv on all is violated", ())


@pytest.mark.parametrize(
    ("given", "covers"),
    [
        (waive(), True),
        (waive("*"), True),
        (waive(slice="*"), True),
        (waive("tail"), False),
        (waive(slice="code"), False),
    ],
)
def test_a_star_is_every_clause_or_slice(given, covers):
    assert given.covers(cell()) is covers


def test_where_everything_is_overridden_nothing_holds():
    state, _ = override(WHOLE, begun(WHOLE), waive("*", "*"), now=T0)

    after, _ = advance(WHOLE, state, finding(OFFLINE, cell(), groups=2), now=T0)

    assert (after.leg, after.why) == (0, "nothing was judged; 2 of 2 to 4 prompt groups")


def test_the_latest_override_of_a_cell_is_the_one_that_counts():
    state, _ = override(WHOLE, begun(WHOLE), waive(), now=T0)

    state, effects = override(WHOLE, state, waive(expires=T0 + 5), now=T0)

    assert state.overrides == (waive(expires=T0 + 5),)
    assert [e.kind for e in effects] == ["notify"]


@pytest.mark.parametrize(
    ("expires", "said"),
    [
        (T0, "the override of tv on all expires before it begins"),
        (float("nan"), "the override of tv on all never expires"),
        (float("inf"), "the override of tv on all never expires"),
    ],
)
def test_an_override_without_a_time_to_live_is_refused(expires, said):
    assert refusal(lambda: override(WHOLE, begun(WHOLE), waive(expires=expires), now=T0)) == [
        said,
        "  hint: give it a time to live, such as --ttl 24h",
    ]


def test_there_is_nothing_to_override_in_a_run_that_has_ended():
    state, _ = roll_back(WHOLE, begun(WHOLE), **ANA, now=T0)

    assert refusal(lambda: override(WHOLE, state, waive(), now=T0)) == [
        "promotion run is rolled back (ana rolled back: seen): there is nothing to override",
        "  hint: start another attempt: servanda promote --fresh",
    ]


@pytest.mark.parametrize("leg", WHOLE, ids=lambda leg: leg.name)
def test_a_person_rolls_back_from_everywhere(leg):
    state, effects = roll_back(WHOLE, brought(WHOLE, leg), **ANA, now=T0)

    assert (state.status, state.why) == ("rolled_back", "ana rolled back: seen")
    assert route_of(WHOLE, state)["share"] == 0.0
    assert ("route" in [e.kind for e in effects]) is (leg not in (OFFLINE, SHADOW))


def test_what_has_expired_in_full_can_be_rolled_back():
    course = tuple(replace(leg, valid_for_s=9.0) for leg in WHOLE)
    state, _ = advance(course, brought(course, FULL), finding(FULL, cell()), now=T0 + 9)
    assert (state.status, route_of(course, state)["share"]) == ("superseded", 1.0)

    state, effects = roll_back(course, state, **ANA, now=T0 + 9)

    assert (state.status, route_of(course, state)["share"]) == ("rolled_back", 0.0)
    assert [e.kind for e in effects] == ["route", "notify"]


def test_a_second_rollback_is_refused():
    state, _ = roll_back(WHOLE, brought(WHOLE, TEN), **ANA, now=T0)

    assert refusal(lambda: roll_back(WHOLE, state, **ANA, now=T0)) == [
        "promotion run is rolled back (ana rolled back: seen)",
        "  hint: servanda promotion status shows who serves",
    ]


@pytest.mark.parametrize(
    ("actor", "reason", "said"),
    [
        (" ", "seen", ["needs an actor", "  hint: give --actor: it is written to the ledger"]),
        ("ana", "", ["needs a reason", "  hint: give --reason: it is written to the ledger"]),
    ],
)
def test_an_act_needs_a_name_and_a_reason(actor, reason, said):
    signed = {"actor": actor, "reason": reason, "now": T0}
    acts = {
        "an approval": lambda: approve(ASKING, awaiting(), **signed),
        "an override": lambda: override(
            ASKING, awaiting(), waive(actor=actor, reason=reason), now=T0
        ),
        "a rollback": lambda: roll_back(ASKING, awaiting(), **signed),
    }

    for name, act in acts.items():
        assert refusal(act) == [f"{name} {said[0]}", said[1]]


def test_no_act_takes_place_before_what_was_seen():
    early = {**ANA, "now": T0 - 1}
    for act in (
        lambda: approve(ASKING, awaiting(), **early),
        lambda: override(ASKING, awaiting(), waive(), now=T0 - 1),
        lambda: roll_back(ASKING, awaiting(), **early),
    ):
        assert refusal(act)[0] == "the clock went back by 1.000 s since promotion run was seen"
