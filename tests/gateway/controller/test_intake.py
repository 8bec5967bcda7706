# The order of rows: closed prefixes of each start, merged so that no answer has a say in it.

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.gateway.controller.intake import NO_ROW, UNREAD, VANISHED, Intake
from servanda.gateway.controller.messages import Message, message_of

NOW = 10_000.0


def row(at=1000.0, **more):
    return {
        "index": 0,
        "run": "toy",
        "leg": "gateway",
        "at": at,
        "served": 1,
        "prompt_token_ids": [1],
        "sampling": {"max_new_tokens": 4},
        "token_ids": [2],
        "logprobs": [-0.5],
        "finish": "length",
        **more,
    }


def offer(intake, start, first, rows, *, now, launched=0):
    counts = {"sampled": launched}
    return intake.offer(Message(*start, first=first, rows=rows, counts=counts), now=now)


def taken(intake, now=NOW, rows=1000):
    return [(r.start[0], r.number) for r in intake.take(rows, 10**9, now=now)]


def test_rows_of_one_start_come_out_in_launch_order():
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row(), row()], now=NOW)
    offer(intake, ("g", 1.0), 2, [row()], now=NOW)
    assert taken(intake) == [("g", 0), ("g", 1), ("g", 2)]


def test_what_came_before_is_not_taken_twice():
    intake = Intake({})
    for _ in range(3):
        offer(intake, ("g", 1.0), 0, [row(), row()], now=NOW)
    assert taken(intake) == [("g", 0), ("g", 1)]


def test_after_a_restart_what_is_durable_is_dropped_and_the_rest_taken():
    intake = Intake({("g", 1.0): 2})
    assert offer(intake, ("g", 1.0), 0, [row()] * 4, now=NOW) == 2
    assert taken(intake) == [("g", 2), ("g", 3)]


def test_a_row_is_acknowledged_only_when_it_is_durable():
    intake = Intake({})
    start = ("g", 1.0)
    assert offer(intake, start, 0, [row(), row()], now=NOW) == 0
    rows = intake.take(1, 10**9, now=NOW)
    assert offer(intake, start, 0, [], now=NOW) == 0
    intake.durable(rows)
    assert offer(intake, start, 0, [], now=NOW) == 1


def test_rows_that_vanish_are_counted_and_do_not_hold_up_the_others():
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row()], now=NOW)
    offer(intake, ("g", 1.0), 5, [row()], now=NOW)
    assert taken(intake) == [("g", 0), ("g", 5)]
    assert intake.outside[VANISHED] == 4


def test_a_new_start_is_numbered_anew():
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row()], now=NOW)
    offer(intake, ("g", 2.0), 0, [row(1001.0)], now=NOW)
    assert [r.start for r in intake.take(9, 10**9, now=NOW)] == [("g", 1.0), ("g", 2.0)]


def test_two_gateways_are_merged_by_the_time_of_launch():
    intake = Intake({})
    offer(intake, ("a", 1.0), 0, [row(1.0), row(4.0)], now=NOW, launched=2)
    offer(intake, ("b", 1.0), 0, [row(2.0), row(3.0)], now=NOW, launched=3)
    # nobody knows yet whether b launches something before a's second
    assert taken(intake) == [("a", 0), ("b", 0), ("b", 1)]
    offer(intake, ("b", 1.0), 2, [row(5.0)], now=NOW)
    assert taken(intake) == [("a", 1), ("b", 2)]


def test_a_gateway_that_waits_for_a_slow_answer_is_waited_for_as_long_as_it_is_heard():
    """Else slow answers would come after fast ones, and they may be the bad ones."""
    intake = Intake({})
    for second in range(300):
        offer(intake, ("a", 1.0), 0, [], now=NOW + second, launched=1)
        offer(intake, ("b", 1.0), 0, [row(NOW - 1)], now=NOW + second, launched=1)
        assert taken(intake, now=NOW + second) == []
    offer(intake, ("a", 1.0), 0, [row(NOW - 2)], now=NOW + 300, launched=1)
    assert taken(intake, now=NOW + 300) == [("a", 0), ("b", 0)]


def test_a_gateway_whose_clock_went_back_while_it_was_away_is_waited_for():
    intake = Intake({})
    offer(intake, ("a", NOW + 3600), 0, [], now=NOW, launched=9)
    for second in (60, 120):
        now = NOW + second
        offer(intake, ("a", NOW), 0, [], now=now, launched=1)
        offer(intake, ("b", 1.0), 0, [row(now - 1)], now=now, launched=1)
        assert taken(intake, now=now) == []
    offer(intake, ("a", NOW), 0, [row(now - 70)], now=now, launched=1)
    assert taken(intake, now=now) == [("a", 0), ("b", 0)]


def test_nobody_waits_for_a_gateway_that_launched_nothing():
    intake = Intake({})
    offer(intake, ("a", 1.0), 0, [], now=NOW)
    offer(intake, ("b", 1.0), 0, [row(NOW + 0.5)], now=NOW + 1, launched=1)
    # a was heard before that row was launched, and may have launched one as well
    assert taken(intake, now=NOW + 1) == []
    offer(intake, ("a", 1.0), 0, [], now=NOW + 1)
    assert taken(intake, now=NOW + 1) == [("b", 0)]


@pytest.mark.parametrize(("now", "later"), [(NOW, NOW + 60), (NOW - 3600, NOW - 3590)])
def test_a_gateway_that_is_not_heard_any_more_holds_nobody_up(now, later):
    """Not where the clock went back, either."""
    intake = Intake({})
    offer(intake, ("a", 1.0), 0, [row(1.0)], now=NOW, launched=9)
    offer(intake, ("b", 1.0), 0, [row(2.0)], now=now)
    assert taken(intake, now=now) == [("a", 0)]
    assert taken(intake, now=later) == [("b", 0)]


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), max_size=12), st.randoms(use_true_random=False))
def test_however_messages_are_cut_the_order_is_the_same(cuts, random):
    """Two gateways, messages of any size, in turns of any kind: one order, each row once."""
    times = {name: sorted(random.uniform(0, 100) for _ in range(15)) for name in ("a", "b")}
    intake, found = Intake({}), []
    sent = {"a": 0, "b": 0}
    for size in [*cuts, 15, 15]:
        for name in random.sample(["a", "b"], 2):
            part = times[name][sent[name] : sent[name] + size]
            more = [row(at) for at in part]
            offer(intake, (name, 1.0), sent[name], more, now=NOW, launched=15)
            sent[name] += len(part)
        found += taken(intake, rows=random.randint(1, 9))
    found += taken(intake)
    wanted = sorted((at, name, i) for name in times for i, at in enumerate(times[name]))
    assert found == [(name, i) for _, name, i in wanted]


def test_a_clock_that_is_ahead_says_nothing_of_the_future():
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row(NOW + 3600), row(5.0)], now=NOW)
    assert [r.at for r in intake.take(9, 10**9, now=NOW)] == [NOW, NOW]


def test_beyond_the_room_the_oldest_are_dropped_and_keep_their_place():
    intake = Intake({}, rows=2)
    offer(intake, ("g", 1.0), 0, [row()] * 5, now=NOW)
    assert [r.dropped for r in intake.take(9, 10**9, now=NOW)] == [True] * 3 + [False] * 2
    assert intake.dropped == 3


def test_beyond_the_tokens_the_oldest_are_dropped():
    intake = Intake({}, tokens=10)
    long = row(prompt_token_ids=[1] * 8)
    offer(intake, ("g", 1.0), 0, [long, long, row()], now=NOW)
    # 9 + 9 + 2: without the first, 11 are still one too many
    assert [r.dropped for r in intake.take(9, 10**9, now=NOW)] == [True, True, False]


def test_what_is_kept_at_all_is_bounded_and_the_gateway_keeps_the_rest():
    intake = Intake({}, rows=2, held=4)
    offer(intake, ("g", 1.0), 0, [row()] * 9, now=NOW)
    assert intake.waiting == 4
    intake.durable(intake.take(4, 10**9, now=NOW))
    assert offer(intake, ("g", 1.0), 4, [row()] * 5, now=NOW) == 4
    assert taken(intake) == [("g", n) for n in range(4, 8)]


def test_rows_that_are_put_back_come_out_first_again():
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row()] * 4, now=NOW)
    rows = intake.take(2, 10**9, now=NOW)
    intake.put_back(rows)
    assert taken(intake) == [("g", n) for n in range(4)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (7, "a row is a JSON object"),
        ({"index": 0}, "'run' is missing"),
        (row(**{"x-chance": 0.0}), "'x-chance' is 0.0, not a probability of 1e-09 to 1"),
        (row(**{"x-chance": 1e-300}), "'x-chance' is 1e-300, not a probability of 1e-09 to 1"),
        (row(**{"x-chance": True}), "'x-chance' is true, not a probability of 1e-09 to 1"),
        (row(**{"x-drawn": [1]}), "'x-drawn' is no object of slices and chances"),
    ],
)
def test_a_row_that_cannot_be_read_takes_its_place_and_is_no_evidence(data, said):
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row(), data, row()], now=NOW)
    found = intake.take(9, 10**9, now=NOW)
    assert [r.outside for r in found] == ["", NO_ROW, ""]
    assert said in intake.wrong


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"logprobs": [0.5]}, "a logprob is never above 0"),
        ({"logprobs": []}, "1 'token_ids' have 0 'logprobs'"),
        ({"finish": "content_filter"}, "a response ends by 'stop', 'length' or 'stop_string'"),
        ({"token_ids": [2**40]}, "not a token id"),
        ({"token_ids": [2] * 5, "logprobs": [-0.5] * 5}, "5 tokens answer a request for at most 4"),
        ({"best": [[[2, -9.0]]]}, "best[0] says"),
        ({"lost": "timeout"}, "cannot both be there"),
    ],
)
def test_a_request_whose_answer_cannot_be_read_is_lost_and_not_left_out(answer, said):
    intake = Intake({})
    offer(intake, ("g", 1.0), 0, [row(**answer)], now=NOW)
    (found,) = intake.take(9, 10**9, now=NOW)
    assert (found.outside, found.request.lost) == ("", UNREAD)
    assert said in intake.wrong


def test_what_is_kept_is_bounded_by_its_numbers_too_and_every_gateway_has_its_turn():
    intake = Intake({}, size=100)
    long = row(prompt_token_ids=[1] * 60)
    offer(intake, ("a", 1.0), 0, [long] * 9, now=NOW)
    assert intake.waiting == 2
    offer(intake, ("b", 1.0), 0, [long] * 9, now=NOW)
    assert intake.waiting == 3  # or everybody would wait for b
    rows = intake.take(9, 10**9, now=NOW)
    intake.durable(rows)
    offer(intake, ("a", 1.0), 2, [long] * 7, now=NOW)
    assert intake.waiting == 2


def test_a_negative_number_is_refused():
    with pytest.raises(EvidenceError, match="first is -1, expected `int` >= 0"):
        message_of({"gateway": "g", "start": 1.0, "first": -1})


def test_starts_that_ended_are_forgotten():
    intake = Intake({})
    for start in range(1000):
        offer(intake, ("g", float(start)), 0, [], now=NOW)
    assert len(intake.streams) == 256
    assert ("g", 999.0) in intake.streams


def test_a_gateway_that_lives_on_is_not_forgotten_for_many_that_began_later():
    intake = Intake({})
    for start in range(1000):
        now = NOW + start
        offer(intake, ("old", 0.0), 0, [], now=now)
        offer(intake, ("crashing", float(start)), 0, [], now=now)
    assert ("old", 0.0) in intake.streams
