# How a slice leaves infer, and how it comes back.

import json
from dataclasses import replace

import numpy as np
import pytest

from servanda.errors import ContractError
from servanda.gateway.routing.evidence_price import late_mean, mean
from servanda.gateway.routing.model import Pin, snapshot_of
from servanda.gateway.routing.snapshot import build_snapshot
from servanda.gateway.routing.state import RAMP, RoutingState, Score, TrafficFacts
from servanda.gateway.routing.state_machine import (
    absorb,
    advance,
    begin,
    pin,
    rebase,
    set_back,
    with_route,
)
from servanda.traces.serialization import from_plain, to_plain
from tests.gateway.routing.made import (
    cell,
    facts,
    fed,
    looked,
    lost,
    one,
    quarantined,
    recovering,
    rules,
    score,
    scores,
)


def shares(rules, state, *, now=0.0):
    made = build_snapshot(rules, state, version=1, salt="00", now=now, samples={})
    return {s.name: s.share for s in made.slices}


def status(state, name="code"):
    return state.slices[name].status


# leaving


def test_a_slice_beyond_its_limit_goes_to_stable_and_the_others_stay():
    rule = rules(cell("code"), cell("chat"))
    state = fed(rule, begin(rule, now=0.0), 1.0)
    state = fed(rule, state, 0.0, of="chat")

    after, (change,) = advance(rule, state, facts(10.0))

    assert (change.before, change.after, change.acted) == ("active", "quarantined", True)
    assert change.cell == "tv on code"
    assert change.log_evidence >= change.log_price
    assert (change.value, change.limit, change.n, change.keys) == (1.0, 0.5, 12, 6)
    assert change.pages == ("oncall",)
    assert shares(rule, after) == {"code": 0.0, "chat": 1.0, "all": 1.0}


def test_numbers_of_a_transition_are_in_units_of_the_metric():
    rule = rules(cell(scale=4.0, low=-2.0))

    _, (change,) = advance(rule, fed(rule, begin(rule, now=0.0), 1.0), facts(10.0))

    assert (change.value, change.limit) == (2.0, 0.0)


def test_a_slice_within_its_limit_stays():
    rule = rules()
    state = fed(rule, begin(rule, now=0.0), 0.25, 400)

    assert advance(rule, state, facts(10.0))[1] == ()


def test_nothing_moves_without_evidence():
    rule = rules()
    state = begin(rule, now=0.0)

    for now in range(0, 10_000, 50):
        state, changes = advance(rule, state, facts(float(now)))
        assert changes == ()


def test_suspicion_changes_no_route_and_goes_when_the_evidence_does():
    rule = rules(enter_evidence=100)
    state = looked(rule, fed(rule, begin(rule, now=0.0), 1.0, 4), 1.0)
    assert status(state) == "suspect"
    assert shares(rule, state)["code"] == 1.0

    state = looked(rule, fed(rule, state, 0.25, 200), 2.0)
    assert status(state) == "suspect"
    state, (change,) = advance(rule, state, facts(102.0))

    assert (change.before, change.after, change.acted) == ("suspect", "active", False)


def test_a_suspect_is_calm_for_a_whole_dwell_before_it_is_none():
    rule = rules(enter_evidence=100)
    state = looked(rule, fed(rule, begin(rule, now=0.0), 1.0, 4), 1.0)
    state = looked(rule, fed(rule, state, 0.25, 200), 2.0)
    state = looked(rule, fed(rule, state, 1.0, 9), 60.0)

    assert status(looked(rule, state, 110.0)) != "active"


@pytest.mark.parametrize(
    ("routing", "changed", "missing"),
    [
        ({"keys": 7}, {}, "the evidence comes from 6 distinct users, and 7 are needed"),
        (
            {},
            {"stable_in_flight": 9.5},
            "stable has no capacity left: 9.5 requests in flight, 1 would be added, and its limit "
            "is 10",
        ),
        ({}, {"stable_in_flight": None}, "the requests in flight at stable are not measured"),
        (
            {},
            {"stable_in_flight": float("nan")},
            "the requests in flight at stable are not measured",
        ),
        ({}, {"in_flight": {}}, "the requests in flight of code are not measured"),
        (
            {"stable_in_flight": None},
            {},
            "routing.stable_in_flight is not declared: the capacity of stable is unknown",
        ),
        (
            {},
            {"shares": {"code": 0.31}},
            "0 of all traffic is diverted, 0.31 would be added, and routing.most_diverted is 0.3",
        ),
        ({}, {"shares": {}}, "the traffic share of code is not measured"),
        (
            {},
            {"floors": {("tv", "code"): 0.3}},
            "the noise floor of train is 0.3, and twice that exceeds the limit 0.5",
        ),
    ],
)
def test_what_is_missing_holds_a_slice_and_is_told_once(routing, changed, missing):
    rule = rules(**routing)
    state = fed(rule, begin(rule, now=0.0), 1.0)

    held, (change,) = advance(rule, state, facts(10.0, **changed))
    again, silent = advance(rule, held, facts(11.0, **changed))

    assert (change.before, change.after, change.acted) == ("active", "suspect", False)
    assert change.reason == held.slices["code"].held == f"not diverted: {missing}"
    assert change.pages == ("oncall",)
    assert silent == ()
    assert again.slices["code"].held == f"not diverted: {missing}"
    assert shares(rule, again)["code"] == 1.0


def test_one_cell_whose_limit_says_something_is_enough():
    rule = rules(cell(), cell(clause="le_cam"))
    state = begin(rule, now=0.0)
    for i in range(20):
        both = {("tv", "code"): 1.0, ("le_cam", "code"): 1.0}
        state = absorb(rule, state, scores(both, f"user {i % 6}"))

    for floors, expected in (
        ({("tv", "code"): 0.3}, "quarantined"),
        ({("tv", "code"): 0.3, ("le_cam", "code"): 0.4}, "suspect"),
    ):
        assert status(looked(rule, state, 1.0, floors=floors)) == expected


def test_the_cell_that_is_named_is_one_that_a_rule_diverts_for():
    rule = rules(cell(), cell(clause="le_cam", diverts=""))
    state = begin(rule, now=0.0)
    for i in range(20):
        both = {("tv", "code"): 0.9, ("le_cam", "code"): 1.0}
        state = absorb(rule, state, scores(both, f"user {i % 6}"))

    _, (change,) = advance(rule, state, facts(1.0))

    assert change.cell == "tv on code"


def test_another_reason_is_told_as_well():
    rule = rules()
    state = fed(rule, begin(rule, now=0.0), 1.0)
    state = looked(rule, state, 10.0, stable_in_flight=None)

    state, (change,) = advance(rule, state, facts(11.0, shares={"code": 0.9}))

    assert (change.before, change.after) == ("suspect", "suspect")
    assert "most_diverted" in change.reason


def test_what_was_held_goes_once_there_is_room():
    rule = rules()
    state = looked(rule, fed(rule, begin(rule, now=0.0), 1.0), 10.0, stable_in_flight=None)

    assert status(looked(rule, state, 11.0)) == "quarantined"


def test_a_slice_that_no_rule_diverts_stays():
    rule = rules(cell(diverts=""))

    state, (change,) = advance(rule, fed(rule, begin(rule, now=0.0), 1.0), facts(10.0))

    assert change.reason == "not diverted: no rule of the contract diverts it"
    assert shares(rule, state)["code"] == 1.0


def test_a_contract_without_a_stable_kernel_diverts_nothing():
    rule = rules(stable=False, without_snapshot="infer")

    state, (change,) = advance(rule, fed(rule, begin(rule, now=0.0), 1.0), facts(10.0))
    made = build_snapshot(rule, state, version=1, salt="00", now=0.0, samples={})

    assert "declares no stable: kernel" in change.reason
    assert (made.has_stable, made.without, made.outside) == (False, "infer", "infer")


def test_two_slices_that_break_at_once_share_the_room_and_the_surer_fault_has_it():
    rule = rules(cell("code"), cell("chat"))
    state = fed(rule, begin(rule, now=0.0), 1.0, 10)
    state = fed(rule, state, 1.0, 20, of="chat")

    state = looked(rule, state, 10.0, stable_in_flight=8.5)

    assert (status(state, "chat"), status(state, "code")) == ("quarantined", "suspect")
    assert state.slices["code"].held == (
        "not diverted: stable has no capacity left: 8.5 requests in flight and 1 more being "
        "diverted, 1 would be added, and its limit is 10"
    )
    # what came is part of what is measured by now
    assert status(looked(rule, state, 80.0, stable_in_flight=9.0)) == "quarantined"


def test_the_breaker_adds_what_is_diverted_already():
    rule = rules(cell("code"), cell("chat"))
    state = looked(rule, fed(rule, begin(rule, now=0.0), 1.0), 10.0)
    state = fed(rule, state, 1.0, of="chat")

    state = looked(rule, state, 20.0, shares={"code": 0.2, "chat": 0.2})

    assert status(state, "chat") == "suspect"
    assert "0.2 of all traffic is diverted, 0.2 would be added" in state.slices["chat"].held


# the whole


def test_the_whole_is_not_diverted_for_itself_unless_a_rule_diverts_all():
    rule = rules(cell("all"))
    state = fed(rule, begin(rule, now=0.0), 1.0, of="all")
    assert "most_diverted" in looked(rule, state, 10.0).slices["all"].held

    rule = rules(cell("all", diverts="all"))
    assert status(looked(rule, state, 10.0), "all") == "quarantined"


def test_to_divert_all_still_needs_room_for_all():
    rule = rules(cell("all", diverts="all"))
    state = fed(rule, begin(rule, now=0.0), 1.0, of="all")

    state = looked(rule, state, 10.0, stable_in_flight=6.5)

    assert "6.5 requests in flight, 4 would be added" in state.slices["all"].held


def test_a_rule_that_diverts_all_takes_the_whole_with_its_slice_and_brings_it_back():
    rule = rules(cell("code", diverts="all"))
    state, changes = advance(rule, fed(rule, begin(rule, now=0.0), 1.0), facts(10.0))
    assert [(c.slice, c.after, c.cell) for c in changes] == [
        ("code", "quarantined", "tv on code"),
        ("all", "quarantined", "tv on code"),
    ]
    assert shares(rule, state) == {"code": 0.0, "all": 0.0}

    # without requests of the slice the whole does not come back either
    for now in (110.0, 500.0, 5000.0):
        state = looked(rule, state, now)
    assert shares(rule, state) == {"code": 0.0, "all": 0.0}

    state = looked(rule, fed(rule, state, 0.0), 5001.0)
    state = looked(rule, state, 5002.0)
    assert (status(state), status(state, "all")) == ("recovering", "recovering")


# coming back


def test_a_slice_comes_back_after_its_dwell_on_fresh_evidence_and_by_a_ramp():
    rule = rules()
    state = quarantined(rule, begin(rule, now=0.0), 10.0)
    state = fed(rule, state, 0.0, 40)  # of the mirror, while the dwell lasts: it decides nothing
    state = looked(rule, state, 109.0)
    assert status(state) == "quarantined"
    state = looked(rule, state, 110.0)
    assert (status(state), state.slices["code"].tracks) == ("probation", {})
    assert status(looked(rule, state, 100_000.0)) == "probation"

    state = looked(rule, fed(rule, state, 0.0), 120.0)
    served = [shares(rule, state)["code"]]
    for now in range(121, 300):
        state = absorb(rule, state, score(0.0, f"user {now % 6}"))
        state = looked(rule, state, float(now))
        if shares(rule, state)["code"] != served[-1]:
            served.append(shares(rule, state)["code"])

    assert served == list(RAMP)
    assert status(state) == "active"


def test_every_cell_of_a_slice_is_shown_before_it_comes_back():
    rule = rules(cell(), cell(clause="le_cam"))
    state = looked(rule, quarantined(rule, begin(rule, now=0.0), 10.0), 110.0)
    for i in range(40):
        state = absorb(
            rule, state, scores({("tv", "code"): 0.0, ("le_cam", "code"): 0.5}, f"{i % 9}")
        )

    assert status(looked(rule, state, 120.0)) == "probation"


def test_a_step_of_the_ramp_needs_its_time_and_its_requests():
    rule = rules()
    state = recovering(rule, begin(rule, now=0.0), 10.0)
    assert state.slices["code"].step == 0

    late = looked(rule, fed(rule, state, 0.0, 19), 10_000.0)
    early = looked(rule, fed(rule, state, 0.0, 40), state.clock + 24.0)
    both = looked(rule, fed(rule, state, 0.0, 20), state.clock + 25.0)

    assert [s.slices["code"].step for s in (late, early, both)] == [0, 0, 1]


def test_a_relapse_doubles_the_dwell_up_to_the_longest():
    rule = rules()
    state = quarantined(rule, begin(rule, now=0.0), 10.0)
    dwells = [state.slices["code"].dwell_s]
    for _ in range(4):
        state = looked(rule, state, state.clock + dwells[-1])
        assert status(state) == "probation"
        state = looked(rule, fed(rule, state, 1.0), state.clock + 1.0)
        assert status(state) == "quarantined"
        dwells.append(state.slices["code"].dwell_s)

    assert dwells == [100.0, 200.0, 400.0, 400.0, 400.0]
    assert state.slices["code"].relapses == 4


def test_a_slice_that_breaks_while_it_recovers_is_away_for_twice_as_long():
    rule = rules()
    state = recovering(rule, begin(rule, now=0.0), 10.0)

    state, (change,) = advance(rule, fed(rule, state, 1.0), facts(state.clock + 1.0))

    assert (change.before, change.after) == ("recovering", "quarantined")
    assert change.reason == "tv on code exceeds its limit; relapse: the hold time is now 200 s"


def test_a_ramp_waits_while_something_is_suspicious():
    rule = rules(enter_evidence=1e6)
    state = fed(rule, begin(rule, now=0.0), 1.0, 40)
    state = recovering(rule, state, 10.0)

    state = fed(rule, fed(rule, state, 0.0, 20), 1.0, 14)
    state = looked(rule, state, state.clock + 1000.0)

    assert (status(state), state.slices["code"].step) == ("recovering", 0)


def test_what_is_on_its_way_back_is_held_where_stable_has_no_room():
    """Its served part has nowhere to go; the ramp does not go on either."""
    rule = rules()
    state = recovering(rule, begin(rule, now=0.0), 10.0)

    state = looked(rule, fed(rule, state, 1.0), state.clock + 500.0, stable_in_flight=10.0)

    assert (status(state), state.slices["code"].step) == ("recovering", 0)
    assert "no capacity left" in state.slices["code"].held


def test_to_and_fro_too_often_is_pinned_to_stable_for_a_while_and_somebody_is_told():
    rule = rules(moves_per_hour=2, dwell="1s", longest_dwell="1s")
    state = recovering(rule, begin(rule, now=0.0), 10.0)  # two moves

    state, (left, pinned) = advance(rule, fed(rule, state, 1.0), facts(state.clock + 1.0))

    assert (left.after, pinned.after) == ("quarantined", "quarantined, pinned to stable")
    assert pinned.pages == ("oncall",)
    assert pinned.reason == (
        "its route changed more than 2 times within an hour; stable serves it for 3600 s"
    )
    state = looked(rule, fed(rule, looked(rule, state, 60.0), 0.0), 61.0)
    assert status(state) == "probation"
    assert "pinned to stable by servanda" in state.slices["code"].held
    state = looked(rule, state, 13.0 + 3600.0)
    assert (status(state), state.slices["code"].pin) == ("recovering", None)


def test_what_is_only_observed_is_never_pinned_by_itself():
    rule = rules(moves_per_hour=1, dwell="1s", longest_dwell="1s", mode="observe")
    state = looked(rule, quarantined(rule, begin(rule, now=0.0), 10.0), 11.0)

    state, (change,) = advance(rule, fed(rule, state, 0.0), facts(12.0))

    assert (change.before, change.after) == ("probation", "probation")
    assert change.reason == (
        "would stay on stable: its route changed more than 1 times within an hour"
    )
    assert state.slices["code"].pin is None
    assert advance(rule, state, facts(13.0))[1] == ()


# observing


def test_who_observes_sees_the_same_and_nothing_is_done():
    acting, watching = rules(), rules(mode="observe")
    first, second = (recovering(rule, begin(rule, now=0.0), 10.0) for rule in (acting, watching))
    made = build_snapshot(watching, second, version=1, salt="00", now=0.0, samples={})

    assert first.slices == second.slices
    assert shares(watching, second)["code"] == RAMP[0]
    assert not any(route.acts for route in made.slices)
    _, changes = advance(watching, fed(watching, second, 1.0), facts(second.clock + 1.0))
    assert [c.acted for c in changes] == [False]


def test_what_would_not_be_done_is_said_as_well():
    rule = rules(mode="observe")
    state = looked(rule, fed(rule, begin(rule, now=0.0), 1.0), 10.0, stable_in_flight=None)

    assert state.slices["code"].held == (
        "would not be diverted: the requests in flight at stable are not measured"
    )


# evidence


def test_a_lost_request_counts_against_both_answers():
    """As a bad one it delays the way back, as a good one the way out."""
    rule = rules()
    state = begin(rule, now=0.0)
    for i in range(12):
        state = absorb(rule, state, Score(0.0, f"{i}", 1.0, {("tv", "code"): lost()}))
    track = state.slices["code"].tracks["tv"]

    assert (track.n, track.missing, track.tokens) == (12, 12, 0)
    assert max(track.above) < 0
    assert max(track.below) < 0


def test_where_bad_answers_are_lost_nothing_is_shown_and_somebody_is_told_once():
    """Lost requests count for neither answer, so that a fault may hide behind them for ever."""
    rule = rules()
    state = fed(rule, begin(rule, now=0.0), 0.0, 1000)
    told = []
    for second in range(300):
        gone = {("tv", "code"): lost()}
        state = absorb(rule, state, Score(0.0, f"user {second % 6}", 1.0, gone))
        state, changes = advance(rule, state, facts(float(second)))
        told += changes
    (change,) = told
    assert (change.before, change.after, change.acted) == ("active", "active", False)
    assert (
        change.reason == "50 % of the recently scored tokens have no value, which can mask a fault"
    )
    assert change.pages == ("oncall",)
    assert state.slices["code"].held.startswith("95 % of the recently scored tokens have no value")
    state = looked(rule, fed(rule, state, 0.0, 300), 400.0)
    assert (state.slices["code"].held, state.slices["code"].told) == ("", ())


def test_a_request_that_met_no_cell_changes_nothing():
    rule = rules()
    state = begin(rule, now=0.0)

    assert absorb(rule, state, score(1.0, of="nothing")) == state
    assert absorb(rule, state, score(1.0, clause="other")) == state


def test_one_key_has_at_most_a_quarter_of_the_evidence():
    rule = rules()
    state = begin(rule, now=0.0)
    for i in range(1000):
        state = absorb(rule, state, score(1.0, "flood"))
        if i % 10 == 0:
            state = absorb(rule, state, score(0.0, f"user {i % 70}"))
    code = state.slices["code"]

    assert code.passed > 900
    assert code.recent.count("flood") <= len(code.recent) / 4 + 1


@pytest.mark.parametrize(
    ("flood", "others", "share", "left"),
    [
        (0.0, 0.2, 19 / 20, True),  # the plain mean is .01, that of the others is what counts
        (0.1, 0.03, 1 / 2, False),  # the plain mean is .065
        (0.1, 0.03, 19 / 20, False),
        (0.2, 0.2, 19 / 20, True),
    ],
)
def test_the_mean_is_over_requests_of_which_no_user_has_more_than_a_quarter(
    flood, others, share, left
):
    rule = rules(cell(limit=0.05), enter_evidence=1000, horizon=10_000, keys=20)
    rng = np.random.default_rng(3)
    state, changes = begin(rule, now=0.0), []
    for i in range(3000):
        mine = rng.random() < share
        key, mean = ("flood", flood) if mine else (f"user {rng.integers(40)}", others)
        x = 0.0 if mean == 0 else rng.beta(0.6, 0.6 / mean - 0.6)
        state = absorb(rule, state, score(x, key))
        if i % 10 == 0:
            state, found = advance(rule, state, facts(float(i) / 1000))
            changes += [c for c in found if c.after == "quarantined"]
    assert bool(changes) == left
    if left:
        reason = changes[0].reason
        assert reason.startswith(
            "tv on code exceeds its limit, with each user limited to 25 % of the requests ("
        )
        assert reason.endswith(" left out)")


def test_whether_a_request_is_passed_over_does_not_hang_on_what_it_shows():
    rule = rules()
    counts = []
    for x in (0.0, 1.0):
        state = begin(rule, now=0.0)
        for i in range(200):
            state = absorb(rule, state, score(x, f"user {i % 3 if i % 2 else 0}"))
        counts.append((state.slices["code"].scored, state.slices["code"].recent))

    assert counts[0] == counts[1]


def test_requests_that_do_not_say_who_asked_are_evidence_and_no_users():
    rule = rules()
    state = begin(rule, now=0.0)
    for _ in range(40):
        state = absorb(rule, state, score(1.0, ""))
    one = looked(rule, state, 10.0).slices["code"]
    assert (one.scored, one.passed, one.keys) == (40, 0, ())
    assert one.held == "not diverted: the evidence comes from 0 distinct users, and 4 are needed"


def test_one_user_is_enough_where_the_contract_says_so():
    rule = rules(keys=1)
    state = fed(rule, begin(rule, now=0.0), 1.0, 20, users=1)

    assert status(looked(rule, state, 1.0)) == "quarantined"


def test_an_old_past_of_many_users_is_no_leave_for_one_to_fill_what_comes_now():
    rule = rules()
    state = fed(rule, begin(rule, now=0.0), 0.0, 2000, users=20)
    before = state.slices["code"].scored
    for _ in range(1000):
        state = absorb(rule, state, score(1.0, "flood"))

    assert state.slices["code"].scored - before < 60


@pytest.mark.parametrize(("keys", "known"), [(4, 128), (20, 160)])
def test_the_latest_requests_are_known_by_their_keys(keys, known):
    rule = rules(keys=keys)
    state = fed(rule, begin(rule, now=0.0), 0.0, 200, users=200)

    assert state.slices["code"].recent == tuple(f"user {i}" for i in range(200 - known, 200))


def test_a_sample_of_one_slice_is_none_of_another():
    rule = rules(cell("code"), cell("all"))
    both = {("tv", "code"): 1.0, ("tv", "all"): 1.0}
    given = replace(scores(both, "a"), drawn={"code": 0.2})

    state = absorb(rule, begin(rule, now=0.0), given)

    assert [state.slices[name].scored for name in ("code", "all")] == [1, 0]
    assert state.slices["code"].tracks["tv"].weights == pytest.approx(5.0)


def test_estimates_weigh_by_the_chance_of_being_scored():
    rule = rules()
    state = begin(rule, now=0.0)
    for i, (x, chance) in enumerate([(0.0, 0.1), (1.0, 0.5)] * 5):
        state = absorb(rule, state, score(x, f"{i}", chance=chance))

    assert mean(state.slices["code"].tracks["tv"]) == pytest.approx(2 / 12)


def test_what_rings_after_a_good_past_shows_the_mean_since_it_went_wrong():
    rule = rules(cell(limit=0.1))
    state = fed(rule, begin(rule, now=0.0), 0.0, 500, users=20)
    state = fed(rule, state, 0.4, 30, users=20)

    track = state.slices["code"].tracks["tv"]

    assert late_mean(track) == pytest.approx(0.4)
    assert mean(track) < 0.1
    _, changes = advance(rule, state, facts(1.0))
    assert [c.after for c in changes] == ["quarantined"]
    assert changes[0].value == pytest.approx(0.4)


# time


def test_a_clock_that_goes_back_stands_still():
    rule = rules()
    state = quarantined(rule, begin(rule, now=1000.0), 1010.0)

    back, changes = advance(rule, state, facts(-5.0))

    assert changes == ()
    assert back.clock == 1010.0
    assert back.slices == state.slices
    assert status(looked(rule, back, 1110.0)) == "probation"


def test_a_state_of_a_clock_that_was_ahead_is_set_back_and_lasts_as_long():
    rule = rules()
    state = quarantined(rule, begin(rule, now=5000.0), 5010.0)
    pinned = Pin("stable", "ann", "x", expires=5070.0)
    state, _ = pin(rule, state, "code", pinned, actor="ann", reason="x", now=5010.0)

    state = set_back(state, now=70.0)

    assert state.clock == 70.0
    assert state.slices["code"].pin.expires == 130.0
    assert status(looked(rule, state, 169.0)) == "quarantined"
    assert status(looked(rule, state, 170.0)) == "probation"


def test_a_later_turn_of_a_promotion_is_followed_and_an_earlier_one_is_not():
    state = begin(rules(), now=0.0)
    shares = []
    for turn, share in ((3, 0.3), (2, 0.2), (3, 0.1), (4, 0.4), (None, 0.5), (4, 0.6)):
        state = with_route(state, share=share, mirror=0.0, run="r", leg="canary-1", turn=turn)
        shares.append(state.base)

    assert shares == [0.3, 0.3, 0.3, 0.4, 0.5, 0.5]


def test_a_pin_is_over_by_its_time_also_where_the_clock_went_back():
    rule = rules()
    state = begin(rule, now=1000.0)
    state, _ = pin(
        rule,
        state,
        "code",
        Pin("stable", "anna", "she looks", 1100.0),
        actor="anna",
        reason="she looks",
        now=500.0,
    )
    assert looked(rule, state, 1099.0).slices["code"].pin is not None

    state, (change,) = advance(rule, state, facts(1100.0))

    assert (change.before, change.after) == ("active, pinned to stable", "active")
    assert (change.reason, change.actor, change.acted) == (
        "the pin of anna expired",
        "servanda",
        True,
    )


# people


def pinned(rule, state, to, *, now=0.0, slice="code", expires=1e9):
    word = Pin(to, "anna", "she looks", expires)
    return pin(rule, state, slice, word, actor="anna", reason="she looks", now=now)


def test_a_pin_is_a_transition_with_who_and_why():
    rule = rules()

    state, (change,) = pinned(rule, begin(rule, now=0.0), "stable", now=5.0)

    assert (change.number, change.at, change.actor) == (1, 5.0, "anna")
    assert (change.before, change.after) == ("active", "active, pinned to stable")
    assert change.reason == "she looks"
    again, none = pinned(rule, state, "stable", now=6.0)
    assert none == ()
    assert again.slices == state.slices


@pytest.mark.parametrize("to", ["stable", "infer"])
def test_a_pinned_slice_changes_no_route_and_evidence_goes_on(to):
    rule = rules()
    state, _ = pinned(rule, begin(rule, now=0.0), to)

    state = looked(rule, fed(rule, state, 1.0), 10.0)
    assert status(state) == "suspect"
    assert state.slices["code"].held == f"not diverted: code is pinned to {to} by anna"

    state, (change,) = pin(rule, state, "code", None, actor="ben", reason="done", now=11.0)
    assert (change.before, change.actor) == (f"suspect, pinned to {to}", "ben")
    assert status(looked(rule, state, 12.0)) == "quarantined"


def test_a_slice_that_is_pinned_to_stable_is_mirrored():
    rule = rules(mode="observe")
    state, _ = pinned(rule, begin(rule, now=0.0), "stable")

    code, _ = build_snapshot(rule, state, version=1, salt="00", now=0.0, samples={}).slices

    assert (code.pinned, code.mirror, code.acts) == ("stable", 0.1, False)


def test_a_person_switches_acting_on_or_off_for_one_slice():
    watching, acting = rules(mode="observe"), rules()

    on, _ = pinned(watching, begin(watching, now=0.0), "enforce")
    off, _ = pinned(acting, begin(acting, now=0.0), "observe")

    for rule, state, expected in ((watching, on, [True, False]), (acting, off, [False, True])):
        made = build_snapshot(rule, state, version=1, salt="00", now=0.0, samples={})
        assert [route.acts for route in made.slices] == expected
        _, (change,) = advance(rule, fed(rule, state, 1.0), facts(10.0))
        assert change.acted is expected[0]


def test_somebody_is_told_when_a_slice_that_is_away_goes_back_because_a_pin_is_over():
    rule = rules(mode="observe")
    state, _ = pinned(rule, begin(rule, now=0.0), "enforce", expires=50.0)
    state = quarantined(rule, state, 10.0)

    state, (change,) = advance(rule, state, facts(50.0))

    assert (change.before, change.after) == ("quarantined, pinned to enforce", "quarantined")
    assert change.pages == ("oncall",)


def test_pins_that_say_nothing_are_refused():
    rule = rules()
    alone = rules(stable=False, without_snapshot="infer")

    with pytest.raises(ContractError) as caught:
        pinned(rule, begin(rule, now=0.0), "stable", slice="cod")
    assert str(caught.value) == "no slice is named 'cod'\n  hint: did you mean 'code'?"
    with pytest.raises(ContractError) as caught:
        pinned(rule, begin(rule, now=50.0), "stable", expires=50.0)
    assert str(caught.value) == (
        "the pin of code would expire before it begins\n  hint: give it a time to live, such as 24h"
    )
    with pytest.raises(ContractError) as caught:
        pinned(alone, begin(alone, now=0.0), "enforce")
    assert str(caught.value) == (
        "code cannot be pinned to enforce: there is no stable: kernel\n"
        "  hint: declare stable: the kernel that serves diverted requests"
    )


# other rules, and the way to disk


def test_after_a_reload_a_slice_is_where_it_was_and_a_new_one_is_active():
    rule = rules(cell("code"), cell("chat"))
    state = looked(rule, fed(rule, begin(rule, now=0.0), 1.0), 10.0)
    state, _ = pinned(rule, fed(rule, state, 0.3, of="chat"), "infer", slice="chat")
    other = rules(cell("code"), cell("maths"), cell("chat"))

    kept = rebase(other, state, now=20.0, keep=True)
    anew = rebase(other, state, now=20.0, keep=False)

    for after in (kept, anew):
        assert list(after.slices) == ["code", "maths", "chat", "all"]
        assert [status(after, n) for n in ("code", "maths")] == ["quarantined", "active"]
        assert after.slices["chat"].pin is not None
        assert after.transitions == state.transitions
    assert kept.slices["chat"].tracks == state.slices["chat"].tracks
    assert anew.slices["chat"].tracks == {}
    assert list(rebase(rules(), kept, now=20.0, keep=True).slices) == ["code", "all"]


def test_evidence_of_a_clause_that_is_gone_is_left_out():
    rule = rules(cell(), cell(clause="le_cam"))
    state = absorb(
        rule, begin(rule, now=0.0), scores({("tv", "code"): 0.3, ("le_cam", "code"): 0.3}, "a")
    )

    kept = rebase(rules(), state, now=1.0, keep=True)

    assert list(kept.slices["code"].tracks) == ["tv"]


def test_a_state_goes_to_json_and_back_without_a_loss():
    rule = rules(cell("code"), cell("chat"))
    state = fed(rule, recovering(rule, begin(rule, now=0.0), 10.0), 0.2, 3)
    state, _ = pinned(rule, state, "infer", slice="chat", now=state.clock)
    state = with_route(state, share=0.05, mirror=0.1, run="r1", leg="canary")
    code = state.slices["code"]
    cold = replace(code, tracks={"tv": replace(code.tracks["tv"], alarm=(-float("inf"),) * 33)})
    state = replace(state, slices={**state.slices, "code": cold})

    read = from_plain(RoutingState, json.loads(json.dumps(to_plain(state))))

    assert read == state


def test_a_snapshot_goes_to_json_and_back_without_a_loss():
    rule = rules(
        cell("code"),
        labels={"team": {"from": "request.metadata.team"}},
        runtime={"envelope": {"prompt_tokens": [1, 900], "outside": "refuse"}},
        expires="30s",
    )
    state = with_route(begin(rule, now=0.0), share=0.25, mirror=0.1, run="r1", leg="canary")

    made = build_snapshot(rule, state, version=7, salt="0a0b", now=100.0, samples={"code": 0.5})

    assert snapshot_of(json.loads(json.dumps(to_plain(made)))) == made
    assert (made.version, made.salt, made.valid_until) == (7, "0a0b", 130.0)
    assert (made.base, made.mirror, made.run, made.leg) == (0.25, 0.1, "r1", "canary")
    assert made.labels == {"team": "request.metadata.team"}
    assert (made.prompt_tokens, made.outside) == ((1, 900), "refuse")
    assert [(r.name, r.share, r.sample) for r in made.slices] == [
        ("code", 0.25, 0.5),
        ("all", 0.25, 0.01),
    ]


def test_the_most_specific_slices_come_first_and_the_whole_last():
    narrow = cell("both")
    narrow = replace(narrow, cut=replace(narrow.cut, terms=narrow.cut.terms * 2))

    rule = rules(cell("all"), cell("code"), narrow)

    assert list(begin(rule, now=0.0).slices) == ["both", "code", "all"]


def test_facts_that_are_not_measured_are_not_zero():
    rule = rules()
    state = fed(rule, begin(rule, now=0.0), 1.0)

    state, _ = advance(rule, state, TrafficFacts(10.0))

    assert status(state) == "suspect"
    assert one(0.5).mean == 0.5
