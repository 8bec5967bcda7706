# advance: what each look does to a run, and with which words.

import json
from dataclasses import replace

import pytest

from servanda.errors import EvidenceError
from servanda.promotion.advance import advance, begin, judged, override, route_of
from servanda.promotion.state import Override, leg_of
from tests.promotion.made import (
    FULL,
    KEY,
    OFFLINE,
    ONE,
    SHADOW,
    T0,
    TEN,
    WHOLE,
    asked,
    begun,
    brought,
    cell,
    finding,
)

EXPIRING = tuple(replace(leg, valid_for_s=100.0) for leg in WHOLE)


def test_a_violation_found_after_the_expiry_rolls_back_all_the_same():
    """In full, what has merely expired keeps its traffic: the violation must be heard first."""
    state = brought(EXPIRING, FULL)

    after, effects = advance(EXPIRING, state, finding(FULL, cell("violated")), now=T0 + 500)

    assert (after.status, after.why) == ("rolled_back", "tv on all is violated")
    assert route_of(EXPIRING, after)["share"] == 0.0
    assert [e.kind for e in effects] == ["route", "notify"]


def test_a_violation_counts_where_a_later_measurement_of_the_same_look_failed():
    """One total order everywhere: violated > error."""
    look = finding(FULL, cell("violated"), error="the server fell silent")

    after, _ = advance(WHOLE, brought(WHOLE, FULL), look, now=T0)

    assert after.status == "rolled_back"


@pytest.mark.parametrize("late", [10, 500])
def test_another_build_keeps_no_traffic_whenever_it_is_found(late):
    state = brought(EXPIRING, FULL)
    look = finding(FULL, cell(), key=replace(KEY, infer="other"))

    after, _ = advance(EXPIRING, state, look, now=T0 + late)

    assert (after.status, after.why) == (
        "superseded",
        "the infer kernel changed since the promotion started",
    )
    assert route_of(EXPIRING, after)["share"] == 0.0


def test_in_full_an_expiry_takes_no_traffic_away():
    state = brought(EXPIRING, FULL)

    after, effects = advance(EXPIRING, state, finding(FULL, cell()), now=T0 + 100)

    assert (after.status, after.why) == ("superseded", "the evidence has expired")
    assert route_of(EXPIRING, after) == route_of(EXPIRING, state)
    assert [e.kind for e in effects] == ["notify"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("contract", "the contract"),
        ("corpus", "the prompts or golden texts"),
        ("train", "the train kernel"),
        ("infer", "the infer kernel"),
        ("stable", "the stable kernel"),
        ("weights", "the weights"),
        ("reward", "the reward"),
        ("attempt", "the attempt"),
    ],
)
def test_a_change_of_any_part_of_the_key_supersedes_the_run(part, text):
    look = finding(OFFLINE, cell(), key=replace(KEY, **{part: 7 if part == "attempt" else "new"}))

    after, _ = advance(WHOLE, begun(WHOLE), look, now=T0)

    assert (after.status, after.why) == (
        "superseded",
        f"{text} changed since the promotion started",
    )


def test_evidence_of_nobody_is_refused():
    """Identity before comparison: a look without a key might be of any kernel."""
    with pytest.raises(EvidenceError) as refused:
        advance(WHOLE, begun(WHOLE), finding(OFFLINE, cell(), key=None), now=T0)

    assert str(refused.value).splitlines() == [
        "the finding on offline has no evidence key, and promotion run is bound to one",
        "  hint: give the key that the kernels answered with: evidence counts for no other",
    ]


def pages(effects):
    return [(e.body["to"], e.body["for"]) for e in effects if e.kind == "page"]


def test_a_page_is_sent_when_its_rule_begins_to_be_met_and_not_while_it_stays_met():
    guard, tail = (asked("page", "oncall", rule=r) for r in ("guards are not met", "tail is bad"))
    state, sent = begun(WHOLE), []

    for rules in [(guard,), (guard,), (guard, tail), (tail,), (), (guard,)]:
        look = finding(OFFLINE, cell("inconclusive"), asked=rules)
        state, effects = advance(WHOLE, state, look, now=T0)
        sent.append(pages(effects))

    # the second rule is heard, though the same person was paged for the first one
    assert sent == [
        [("oncall", ["guards are not met"])],
        [],
        [("oncall", ["tail is bad"])],
        [],
        [],
        [("oncall", ["guards are not met"])],
    ]


def test_two_rules_that_page_the_same_person_at_once_page_once():
    rules = asked("page", "oncall", rule="one"), asked("page", "oncall", rule="two")
    look = finding(OFFLINE, cell("violated"), asked=rules)

    _, effects = advance(WHOLE, begun(WHOLE), look, now=T0)

    assert pages(effects) == [("oncall", ["one", "two"])]
    assert len({e.key for e in effects}) == len(effects)


def test_a_rule_is_told_by_a_cell_that_counts():
    """What was overridden is not the reason of anything."""
    state, _ = override(WHOLE, begun(WHOLE), Override("tv", "all", "ana", "known", T0 + 9), now=T0)
    back = asked("roll_back", "", cell("violated"), cell("violated", slice="code"))

    after, _ = advance(WHOLE, state, finding(OFFLINE, cell(), asked=[back]), now=T0)

    assert after.why == "an escalation rule asks for a rollback: tv on code"


def test_a_rule_that_only_overridden_cells_meet_asks_for_nothing():
    state, _ = override(WHOLE, begun(WHOLE), Override("*", "all", "ana", "known", T0 + 9), now=T0)
    rules = asked("roll_back"), asked("page", "oncall")

    after, effects = advance(WHOLE, state, finding(OFFLINE, cell(), groups=2, asked=rules), now=T0)

    assert (after.status, after.asked, pages(effects)) == ("awaiting_evidence", (), [])


def test_a_course_is_not_completed_before_the_dwell_of_its_last_leg_is_over():
    course = (OFFLINE, replace(FULL, dwell_s=60.0))
    state = brought(course, FULL)

    early, _ = advance(course, state, finding(FULL, cell()), now=T0 + 59)
    late, _ = advance(course, early, finding(FULL, cell()), now=T0 + 60)

    assert (early.status, early.why) == ("running", "everything holds; 59 of 60 s of the hold time")
    assert (late.status, late.why) == ("completed", "everything holds on full-1")


def test_a_completed_course_stays_so_while_its_next_span_dwells():
    course = (OFFLINE, replace(FULL, dwell_s=60.0))
    state, _ = advance(course, brought(course, FULL), finding(FULL, cell()), now=T0 + 60)

    after, effects = advance(course, state, finding("full-2", cell()), now=T0 + 70)

    assert (state.span, after.status, effects) == (2, "completed", ())


@pytest.mark.parametrize("course", [(OFFLINE,), (OFFLINE, ONE)], ids=["offline", "canary"])
def test_spans_are_of_full_and_of_no_other_last_leg(course):
    state = brought(course, course[-1])
    state, _ = advance(course, state, finding(course[-1], cell()), now=T0)

    again, effects = advance(course, state, finding(course[-1], cell()), now=T0 + 5)

    assert (again.status, again.span, again.since) == ("completed", 1, T0)
    assert (again.turn, effects) == (state.turn, ())


def test_looking_again_at_old_evidence_does_not_make_it_younger():
    course = (replace(OFFLINE, approval=True, valid_for_s=100.0), FULL)
    state = begun(course)

    for later in (0, 50, 99):
        state, _ = advance(course, state, finding(OFFLINE, cell()), now=T0 + later)
    assert (state.status, state.valid_until) == ("awaiting_approval", T0 + 100)
    after, _ = advance(course, state, finding(OFFLINE, cell()), now=T0 + 100)

    assert (after.status, after.why) == ("superseded", "the evidence has expired")


def test_new_evidence_is_valid_from_when_it_came():
    course = (replace(OFFLINE, approval=True, valid_for_s=100.0), FULL)
    state, _ = advance(course, begun(course), finding(OFFLINE, cell()), now=T0)

    state, _ = advance(course, state, finding(OFFLINE, cell(), evidence="more"), now=T0 + 50)

    assert (state.status, state.valid_until) == ("awaiting_approval", T0 + 150)


def test_an_override_does_not_carry_evidence_that_is_too_old_forward():
    course = (replace(OFFLINE, valid_for_s=100.0), FULL)
    look = finding(OFFLINE, cell(), cell("inconclusive", slice="code"), groups=3)
    state, _ = advance(course, begun(course), look, now=T0)
    waived = Override("tv", "code", "ana", "rare", T0 + 999)
    state, _ = override(course, state, waived, now=T0 + 150)

    after, _ = advance(course, state, look, now=T0 + 150)

    assert (after.status, after.leg) == ("superseded", 0)


def test_a_cell_that_is_an_error_has_the_budget_of_errors_and_rolls_nothing_back():
    """Trouble in measuring is no word against the kernel, at the limit neither."""
    course = (OFFLINE, replace(ONE, if_inconclusive="roll_back"), FULL)
    state, said = brought(course, ONE), []
    lost = replace(cell("error", "usable_ratio", guard=True), note="3 of 9 tokens were lost")

    for _ in range(3):
        state, _ = advance(course, state, finding(ONE, lost, cell()), now=T0)
        said.append((state.status, state.why))

    text = "usable_ratio on all: 3 of 9 tokens were lost"
    assert said == [
        ("awaiting_evidence", f"measuring failed: {text}"),
        ("awaiting_evidence", f"measuring failed: {text}"),
        ("halted", f"measuring failed 3 times in a row: {text}"),
    ]
    assert route_of(course, state)["share"] == ONE.share


@pytest.mark.parametrize("guard", [False, True])
def test_what_has_no_sample_behind_it_does_not_hold(guard):
    empty = cell(clause="other", n=0, guard=guard)

    after, _ = advance(WHOLE, begun(WHOLE), finding(OFFLINE, cell(), empty, groups=2), now=T0)

    assert (after.status, after.leg) == ("awaiting_evidence", 0)
    assert after.why == "other on all is inconclusive; 2 of 2 to 4 prompt groups"


@pytest.mark.parametrize("other", [(), (cell("not applicable"),)], ids=["alone", "not applicable"])
def test_guards_alone_carry_nothing_forward(other):
    look = finding(OFFLINE, cell(guard=True), *other, groups=2)

    after, _ = advance(WHOLE, begun(WHOLE), look, now=T0)

    assert (after.status, after.leg) == ("awaiting_evidence", 0)
    assert after.why == "nothing was judged; 2 of 2 to 4 prompt groups"


def test_what_was_overridden_is_not_said_to_hold():
    waived = Override("tv", "code", "ana", "rare", T0 + 9)
    state, _ = override(WHOLE, begun(WHOLE), waived, now=T0)
    look = finding(OFFLINE, cell(), cell("violated", slice="code"), cell(slice="prose"))

    after, _ = advance(WHOLE, state, look, now=T0)

    assert after.why == "everything but tv on code (overridden) held on offline"


def test_a_route_is_plain_data_and_names_the_span_it_came_from():
    state, _ = advance(WHOLE, brought(WHOLE, FULL), finding(FULL, cell()), now=T0)
    worst = cell("violated", high=float("inf"))

    _, effects = advance(WHOLE, state, finding("full-2", worst), now=T0)

    route = next(e for e in effects if e.kind == "route").body
    assert (route["from"], route["leg"], route["share"]) == ("full-2", "full-2", 0.0)
    assert json.loads(json.dumps(route, allow_nan=False)) == route


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_what_is_no_time_is_refused(now):
    for act in (
        lambda: begin("run", KEY, WHOLE, now=now),
        lambda: advance(WHOLE, begun(WHOLE), finding(OFFLINE, cell()), now=now),
    ):
        with pytest.raises(EvidenceError, match=f"the clock reads {now}, which is not a time"):
            act()


# each status, and the words that come with it


def test_a_run_begins_at_its_first_leg_and_tells_who_serves():
    state, effects = begin("run", KEY, WHOLE, now=T0)

    assert (state.status, state.why, state.leg, state.turn) == (
        "running",
        "the promotion starts",
        0,
        1,
    )
    assert [(e.kind, e.key) for e in effects] == [
        ("route", "run:1:route"),
        ("notify", "run:1:notify"),
    ]
    assert effects[0].body == {
        "run": "run",
        "leg": "offline",
        "stage": "offline",
        "status": "running",
        "from": None,
        "share": 0.0,
        "mirror": 0.0,
        "sample": 0.0,
        "why": "the promotion starts",
        "decided": None,
        "at": T0,
        "turn": 1,
    }


def test_what_held_goes_one_leg_forward_with_the_numbers_that_decided():
    near = cell(clause="tail", high=0.04)

    state, effects = advance(WHOLE, begun(WHOLE), finding(OFFLINE, cell(), near), now=T0 + 5)

    assert (state.status, state.why, state.leg) == ("running", "everything held on offline", 1)
    assert (state.since, state.approved, state.turn) == (T0 + 5, "", 2)
    told = effects[0].body
    assert (told["from"], told["leg"], told["mirror"]) == ("offline", "shadow", 0.05)
    assert told["decided"] == {
        "cell": "tail on all",
        "value": 0.01,
        "low": 0.0,
        "high": 0.04,
        "limit": 0.05,
        "n": 100,
        "units": "tokens",
        "outcome": "holds",
        "note": "",
    }


def stands(course, at, look, *, later=0.0):
    """Status and reason after one look at a run that came to a leg."""
    state, _ = advance(course, brought(course, at), look, now=T0 + later)
    return state.status, state.why


def test_undecided_it_awaits_evidence():
    look = finding(SHADOW, cell(), cell("inconclusive", "tail"), groups=3)

    assert stands(WHOLE, SHADOW, look) == (
        "awaiting_evidence",
        "tail on all is inconclusive; 3 of 2 to 4 prompt groups",
    )


def test_before_the_first_look_nothing_goes_forward_on_traffic():
    assert stands(WHOLE, SHADOW, finding(SHADOW, cell(), groups=1)) == (
        "awaiting_evidence",
        "1 of 2 prompt groups",
    )


@pytest.mark.parametrize(
    ("rule", "status", "why"),
    [
        ("hold", "halted", "tv on all is inconclusive at the limit of 4 prompt groups"),
        ("roll_back", "rolled_back", "tv on all is inconclusive at the limit of 4 prompt groups"),
        ("wait", "awaiting_evidence", "tv on all is inconclusive; 4 of 2 to 4 prompt groups"),
    ],
)
def test_undecided_at_the_limit_it_does_what_the_stage_says(rule, status, why):
    course = (OFFLINE, replace(ONE, if_inconclusive=rule), FULL)

    assert stands(course, ONE, finding(ONE, cell("inconclusive"))) == (status, why)


def test_a_leg_lasts_as_long_as_its_dwell():
    course = (OFFLINE, replace(ONE, dwell_s=3600.0), FULL)

    early = stands(course, ONE, finding(ONE, cell()), later=3599)

    assert early == ("running", "everything holds; 3,599 of 3,600 s of the hold time")
    assert stands(course, ONE, finding(ONE, cell()), later=3600)[1] == "everything held on canary-1"


def test_a_person_is_asked_where_the_stage_says_so():
    course = (OFFLINE, ONE, replace(TEN, approval=True), FULL)

    assert stands(course, TEN, finding(TEN, cell())) == (
        "awaiting_approval",
        "everything holds; full-1 needs an approval",
    )


def test_who_awaits_a_person_is_rolled_back_by_a_violation():
    """Guards are evaluated in every phase, approvals included."""
    course = (OFFLINE, replace(ONE, approval=True), FULL)
    state, _ = advance(course, brought(course, ONE), finding(ONE, cell()), now=T0)
    assert state.status == "awaiting_approval"

    after, _ = advance(course, state, finding(ONE, cell("violated"), groups=5), now=T0)

    assert (after.status, after.why) == ("rolled_back", "tv on all is violated")


def test_a_run_that_is_rolled_back_keeps_its_shadow():
    state, _ = advance(WHOLE, brought(WHOLE, TEN), finding(TEN, cell("violated")), now=T0)

    assert route_of(WHOLE, state) == {"share": 0.0, "mirror": 0.05, "sample": 1.0}


def test_measuring_that_fails_has_a_budget_and_one_success_fills_it_again():
    state, said = brought(WHOLE, SHADOW), []
    bad, good = finding(SHADOW, error="no answer"), finding(SHADOW, cell("inconclusive"), groups=2)

    for look in (bad, bad, good, bad, bad, bad, good):
        state, _ = advance(WHOLE, state, look, now=T0)
        said.append((state.status, state.errors))

    waits = "awaiting_evidence"
    assert said == [
        *((waits, 1), (waits, 2), (waits, 0)),
        *((waits, 1), (waits, 2), ("halted", 3), (waits, 0)),
    ]


@pytest.mark.parametrize(
    ("action", "look", "status", "why"),
    [
        ("hold", cell(), "halted", "an escalation rule asks for a hold: tv on all"),
        ("halt", cell(), "halted", "an escalation rule asks for a halt: tv on all"),
        ("halt", cell("inconclusive"), "halted", "an escalation rule asks for a halt: tv on all"),
        ("roll_back", cell(), "rolled_back", "an escalation rule asks for a rollback: tv on all"),
    ],
)
def test_a_rule_of_the_contract_is_heard(action, look, status, why):
    assert stands(WHOLE, ONE, finding(ONE, look, asked=[asked(action)])) == (status, why)


def test_the_last_leg_completes_the_run_and_each_limit_begins_a_fresh_span():
    state, effects = advance(WHOLE, brought(WHOLE, FULL), finding(FULL, cell()), now=T0 + 9)

    assert (state.status, state.why) == ("completed", "everything holds on full-1")
    assert (leg_of(WHOLE, state).name, state.since) == ("full-2", T0 + 9)
    assert [e.kind for e in effects] == ["route", "notify"]  # who logs has to know the leg
    assert effects[0].body["leg"] == "full-2"


def test_an_ended_run_is_left_as_it_is():
    state, _ = advance(WHOLE, begun(WHOLE), finding(OFFLINE, cell("violated")), now=T0)

    assert advance(WHOLE, state, finding(OFFLINE, cell()), now=T0 + 9) == (state, ())


def test_a_clock_that_goes_back_is_refused():
    state = begun(WHOLE)

    with pytest.raises(EvidenceError) as refused:
        advance(WHOLE, state, finding(OFFLINE, cell()), now=T0 - 1500)

    assert str(refused.value).splitlines() == [
        "the clock went back by 1,500.000 s since promotion run was seen",
        "  hint: set this machine's clock: hold time and expiry depend on it; nothing was changed",
    ]


def test_a_finding_of_another_leg_is_refused():
    with pytest.raises(EvidenceError) as refused:
        advance(WHOLE, begun(WHOLE), finding(SHADOW, cell()), now=T0)

    assert str(refused.value).splitlines() == [
        "the finding is for step shadow, and promotion run is at offline",
        "  hint: evaluate again: the promotion moved in the meantime",
    ]


def test_the_cell_that_decides_is_the_one_nearest_to_its_limit():
    far, near, unknown = cell(high=0.01), cell(clause="near", high=0.049), cell(high=None)
    broken = cell("violated", clause="broken", high=0.2)

    assert judged([far, near, unknown]) == ("holds", near)
    assert judged([far, broken, near]) == ("violated", broken)
    assert judged([]) == ("inconclusive", None)


def test_a_limit_from_below_is_near_where_little_is_above_it():
    upper = cell(high=0.02, limit=0.05)
    ample = replace(
        upper, clause="ample", value=50.0, low=45.0, high=60.0, limit=9.0, at_least=True
    )
    scarce = replace(ample, clause="scarce", low=9.1)
    sampled = replace(upper, clause="coverage", value=0.01, low=None, high=None, at_least=True)
    none = replace(sampled, clause="none", value=0.0)

    assert judged([upper, ample])[1] == upper
    assert judged([upper, ample, scarce])[1] == scarce
    undecided = [replace(c, outcome="inconclusive") for c in (upper, sampled)]
    assert judged(undecided)[1] == undecided[1]
    assert judged([*undecided, replace(none, outcome="inconclusive")])[1].clause == "none"


def test_what_may_not_be_at_all_is_far_beyond_its_limit():
    broken = cell("violated", high=0.2)
    never = cell("violated", clause="never", high=1.0, limit=0.0)

    assert judged([broken, never]) == ("violated", never)
    assert judged([cell(), cell(clause="never", high=0.0, limit=0.0)]) == ("holds", cell())


@pytest.mark.parametrize(("then", "status"), [("hold", "halted"), ("wait", "awaiting_evidence")])
def test_in_full_a_span_that_stays_undecided_is_followed_by_a_fresh_one(then, status):
    """Infer serves everybody, so somebody goes on looking."""
    course = (OFFLINE, replace(FULL, if_inconclusive=then))
    state = brought(course, FULL)

    state, _ = advance(course, state, finding(FULL, cell("inconclusive"), groups=4), now=T0 + 1)

    assert (state.span, state.status) == (2, status)
    assert route_of(course, state)["share"] == 1.0
    assert leg_of(course, state).name == "full-2"


def test_a_span_that_begins_does_not_undo_that_the_one_before_it_held():
    course = (OFFLINE, FULL)
    state, _ = advance(course, brought(course, FULL), finding(FULL, cell(), groups=4), now=T0 + 1)
    assert (state.span, state.status) == (2, "completed")

    early = finding("full-2", cell("inconclusive"), groups=1)
    state, effects = advance(course, state, early, now=T0 + 2)

    assert (state.status, effects) == ("completed", ())
    since = "on full-2 tv on all is inconclusive; 1 of 2 to 4 prompt groups"
    assert state.why == f"everything held before; {since}"


def test_a_violation_on_a_later_span_rolls_back_as_on_any_other():
    course = (OFFLINE, FULL)
    state, _ = advance(course, brought(course, FULL), finding(FULL, cell(), groups=4), now=T0 + 1)

    state, _ = advance(course, state, finding("full-2", cell("violated"), groups=1), now=T0 + 2)

    assert state.status == "rolled_back"
    assert route_of(course, state)["share"] == 0.0
