# What is told of a run: a row a leg with the cell that decided, and the next move.

import json
from dataclasses import replace

import pytest

from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run import report
from servanda.promotion.run.history import advance_run, approve_run, override_cell, roll_back_run
from servanda.promotion.state import Override
from tests.promotion.run.histories import ACTOR, LEGS, cell, finding, key, reaching


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(str(tmp_path / "ledger.db")) as found:
        yield found


def looked(ledger, leg, found, now=1000.0):
    return advance_run(ledger, reaching(ledger, leg), found, actor=ACTOR, now=now)


def lines(story, now=1000.0):
    return report.text(story, now=now).splitlines()


def test_a_run_is_a_row_a_leg_with_the_cell_that_decided_its_interval_and_its_n(ledger):
    story = looked(ledger, "canary-1", finding("canary-1", "inconclusive", groups=64))

    assert lines(story) == [
        f"{story.run}  the new build",
        "  stage     traffic       state              groups             decided by  measured"
        "  interval   limit  n",
        "✓ offline   none          held               128 of 100 to 400  tv on all   0.01    "
        "  [0, 0.02]  0.05   900 tokens",
        "✓ shadow    5 % mirrored  held               128 of 100 to 400  tv on all   0.01    "
        "  [0, 0.02]  0.05   900 tokens",
        "▶ canary-1  10 %          awaiting evidence  64 of 100 to 400   tv on all   0.01    "
        "  [0, 0.02]  0.05   900 tokens",
        "· canary-2  50 %          to come            100 to 400",
        "· full-1    100 %         to come            100 to 400",
        "",
        "AWAITING EVIDENCE on canary-1: tv on all is inconclusive; 64 of 100 to 400 prompt groups",
        "  next: wait for traffic, then run servanda promote again, or use --every 30s",
    ]


@pytest.mark.parametrize("leg", LEGS)
def test_every_leg_before_the_one_reached_has_held(ledger, leg):
    states = [row.state for row in report.rows(reaching(ledger, leg))]

    at = LEGS.index(leg)
    assert states == ["held"] * at + ["running"] + ["to come"] * (4 - at)


def test_the_next_move_is_a_command_that_there_is(ledger):
    story = reaching(ledger, "canary-2")
    asks = advance_run(ledger, story, finding("canary-2"), actor=ACTOR, now=1000.0)
    assert lines(asks)[-1] == f"  next: servanda promotion approve {story.run} --reason TEXT"

    goes_on = approve_run(ledger, asks, actor=ACTOR, reason="well", now=1001.0)
    full = advance_run(ledger, goes_on, finding("canary-2"), actor=ACTOR, now=1002.0)
    assert lines(full)[-1] == "  next: run servanda promote again"

    through = advance_run(ledger, full, finding("full-1"), actor=ACTOR, now=1003.0)
    assert lines(through)[-2] == "COMPLETED: everything holds on full-1"
    assert lines(through)[-1].startswith("  next: servanda promote --every 5m keeps evaluating")

    back = roll_back_run(ledger, through, actor=ACTOR, reason="enough", now=1004.0)
    assert lines(back)[-3] == "ROLLED BACK on full-1: Ada rolled back: enough"
    assert (
        lines(back)[-2]
        == "  the infer kernel serves 0 % of the traffic now, 5 % are mirrored to it"
    )
    assert lines(back)[-1] == "  next: promote a repaired build: servanda promote --fresh"


def test_what_waits_for_its_dwell_says_how_long(ledger):
    story = reaching(ledger, "canary-1")
    early = finding("canary-1")

    waits = advance_run(ledger, story, early, actor=ACTOR, now=story.state.since + 20)

    assert waits.state.status == "running"
    assert lines(waits)[-2:] == [
        "RUNNING on canary-1: everything holds; 20 of 60 s of the hold time",
        "  next: run servanda promote again in 40 s",
    ]


def test_a_halted_run_says_both_ways_out(ledger):
    story = looked(ledger, "shadow", finding("shadow", "inconclusive", groups=400))

    assert lines(story)[-2:] == [
        f"  next: servanda promotion override {story.run} --clause ID --slice NAME --ttl 24h "
        "--reason TEXT",
        f"  next: servanda promotion rollback {story.run} --reason TEXT",
    ]


def test_a_measurement_that_failed_has_no_numbers(ledger):
    failed = replace(finding("shadow"), key=None, groups=0, cells=(), error="the server is gone")
    story = looked(ledger, "shadow", failed)

    row = report.rows(story)[1]

    assert (row.state, row.groups, row.decided) == ("not measured", None, None)
    assert lines(story)[-2:] == [
        "AWAITING EVIDENCE on shadow: measuring failed: the server is gone",
        "  next: repair the failure, then run servanda promote again",
    ]
    for _ in range(2):
        story = advance_run(ledger, story, failed, actor=ACTOR, now=1000.0)
    assert lines(story)[-2:] == [
        "  next: repair the failure, then run servanda promote again",
        f"  next: servanda promotion rollback {story.run} --reason TEXT",
    ]


def test_a_limit_from_below_is_shown_as_one(ledger):
    few = cell("inconclusive", value=0.02, low=None, high=None, limit=0.1, at_least=True)
    few = replace(few, clause="coverage")
    story = looked(ledger, "shadow", replace(finding("shadow"), cells=(cell(), few)))

    assert "coverage on all 0.02 at least 0.1 900 tokens" in " ".join(lines(story)[3].split())


def test_overrides_are_shown_while_they_last(ledger):
    story = looked(ledger, "shadow", finding("shadow", "inconclusive", groups=400))
    given = Override("tv", "*", "Grace", "known and small", 5000.0)
    story = override_cell(ledger, story, given, now=2000.0)

    shown = "  overridden until 1970-01-01 01:23:20Z by Grace: tv on * (known and small)"

    assert shown in lines(story, now=4999.0)
    assert shown not in lines(story, now=5000.0)


def test_a_run_is_plain_data_with_its_route_and_its_numbers(ledger):
    story = looked(ledger, "canary-1", finding("canary-1", "violated"))

    data = json.loads(json.dumps(report.data(story, now=1000.0)))

    assert data["status"] == "rolled_back"
    assert data["route"] == {"share": 0.0, "mirror": 0.05, "sample": 1.0}
    assert data["key"]["infer"] == key().infer
    decided = data["legs"][2]["decided"]
    assert (decided["value"], decided["low"], decided["high"]) == (0.09, 0.07, 0.11)
    assert data["legs"][4]["decided"] is None


def test_names_from_outside_stay_on_one_line(ledger):
    odd = replace(finding("shadow"), cells=(replace(cell(), slice="a\nb\x1b[31m"),))
    story = looked(ledger, "shadow", odd)

    assert not any("\x1b" in line or "\n" in line for line in lines(story))
