# The timeline of a promotion as a page: steps, traffic, evaluations and approvals.

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from servanda.cli.main import main
from servanda.promotion.ledger.open import open_ledger
from servanda.promotion.run import timeline
from servanda.promotion.run.record import advance_run, override_cell, roll_back_run
from servanda.promotion.state import Override
from servanda.report.html_shapes import Scale
from tests.promotion.run.histories import ACTOR, LEGS, cell, finding, opened, reaching


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(str(tmp_path / "ledger.db")) as found:
        yield found


@pytest.fixture
def failed(ledger):
    """A promotion that was approved, and violated in full."""
    history = reaching(ledger, "full-1")
    return advance_run(ledger, history, finding("full-1", "violated"), actor=ACTOR, now=900.0)


def sheets(ledger, run, now=1000.0):
    told = timeline.story([*timeline.moments(ledger.entries(run))], now=now)
    return {sheet.title: sheet for sheet in told.sheets}


def picture(sheet):
    return ElementTree.fromstring(sheet.picture)


def words(element):
    return [text for text in element.itertext() if text.strip()]


def percent(text):
    assert text.endswith("%")
    return float(text[:-1])


def test_it_has_a_lane_for_each_step_and_says_so_to_those_who_do_not_see_it(ledger, failed):
    drawn = picture(sheets(ledger, failed.run)["Steps"])

    assert drawn.get("role") == "img"
    assert f"Steps of promotion {failed.run}: offline held" in drawn.get("aria-label")
    lanes = [t.partition(":")[0] for t in words(drawn) if ":" in t and "time" not in t]
    assert lanes == [*LEGS]
    assert len([*drawn.iter("rect")]) == 5


def test_every_evaluation_and_decision_is_a_mark_and_a_row_in_view(ledger, failed):
    steps, events = (sheets(ledger, failed.run)[name] for name in ("Steps", "Events"))
    kinds = [re.sub("<.*>", "", row[4]) for row in events.rows]

    assert kinds.count("holds") == 5 and kinds.count("approval") >= 1
    assert kinds[-1] == "violated" and len(kinds) == 6 + kinds.count("approval")
    marks = steps.picture.count('class="mark"') + steps.picture.count('class="dot"')
    assert marks == len(events.rows)
    reasons = [row[5] for row in events.rows]
    assert f"by {ACTOR}: it looks well" in reasons and reasons[-1] == "tv on all is violated"
    assert "0.09 [0.07, 0.11], limit 0.05, n 900 tokens" in events.rows[-1][6]
    assert "<title>" not in steps.picture  # nothing is told by hovering alone


def test_the_share_of_traffic_ends_at_none_after_a_rollback(ledger, failed):
    drawn = picture(sheets(ledger, failed.run)["Share of traffic"])
    line = next(one for one in drawn.iter("polyline") if one.get("class") == "serves")

    points = [tuple(map(float, at.split(","))) for at in line.get("points").split()]
    shares = [100 - y for _, y in points]
    assert max(shares) == 100 and shares[0] == shares[-1] == 0
    assert points == sorted(points, key=lambda point: point[0])
    assert "it is 0 % now, at most 100 %" in drawn.get("aria-label")


def test_the_deciding_cells_lie_where_their_numbers_are(ledger):
    history = opened(ledger)
    numbers = [(0.04, 0.03, 0.06), (0.09, 0.07, 0.11)]
    for i, (value, low, high) in enumerate(numbers):
        outcome = ("inconclusive", "violated")[i]
        found = cell(outcome, value=value, low=low, high=high)
        found = replace(finding("offline", outcome, 64 * (i + 1)), cells=(found,))
        history = advance_run(ledger, history, found, actor=ACTOR, now=100.0 * (i + 1))

    drawn = picture(sheets(ledger, history.run)["Deciding cell of each evaluation"])

    axis = Scale.of([1.0, 0.8, 1.8, 1.2, 2.2])
    bars = [line for line in drawn.iter("line") if line.get("class") == "bar"]
    for bar, at, (_, low, high) in zip(bars, (50, 100), numbers, strict=True):
        assert percent(bar.get("x1")) == percent(bar.get("x2")) == at
        ends = [100 - percent(bar.get(y)) for y in ("y1", "y2")]
        assert ends == pytest.approx([axis.at(low / 0.05), axis.at(high / 0.05)], abs=0.01)
    marks = [one for one in drawn.iter("svg") if one.get("class") == "mark"]
    heights = [100 - percent(one.get("y")) for one in marks]
    assert heights == pytest.approx([axis.at(0.8), axis.at(1.8)], abs=0.01)
    limit = next(line for line in drawn.iter("line") if line.get("class") == "limit")
    assert 100 - percent(limit.get("y1")) == pytest.approx(axis.at(1.0), abs=0.01)


def test_a_limit_from_below_is_turned_so_that_above_is_bad_for_both():
    below = cell("violated", value=0.5, low=0.4, high=0.6, limit=0.9, at_least=True)

    assert timeline._times(below, below.value) == pytest.approx(1.8)
    assert timeline._times(cell(value=0.01), 0.01) == pytest.approx(0.2)
    assert timeline._times(cell(limit=None), 0.01) is None


def test_of_many_evaluations_the_ends_of_the_intervals_are_lines(ledger):
    history = opened(ledger)
    for i in range(70):
        found = (cell("inconclusive", value=0.04, low=0.02, high=0.06),)
        found = replace(finding("offline", "inconclusive", 100 + i), cells=found)
        history = advance_run(ledger, history, found, actor=ACTOR, now=100.0 * (i + 1))

    drawn = picture(sheets(ledger, history.run)["Deciding cell of each evaluation"])

    assert not [one for one in drawn.iter("line") if one.get("class") == "bar"]
    axis = Scale.of([1.0, 1.2, 0.8])
    for one, end in zip(drawn.iter("polyline"), (0.4, 1.2), strict=True):
        points = [at.split(",") for at in one.get("points").split()]
        assert len(points) == 70
        assert [100 - float(y) for _, y in points] == pytest.approx([axis.at(end)] * 70, abs=0.01)


def test_one_evaluation_is_drawn(ledger):
    history = advance_run(ledger, opened(ledger), finding("offline"), actor=ACTOR, now=10.0)

    found = sheets(ledger, history.run)

    assert len(found["Events"].rows) == 1
    assert "cell of 1 evaluation," in found["Deciding cell of each evaluation"].picture


def test_a_promotion_without_an_evaluation_has_neither_table_nor_picture_of_any(ledger):
    history = opened(ledger)

    found = sheets(ledger, history.run)

    assert [*found] == ["Share of traffic", "Steps"]
    assert words(picture(found["Steps"])).count("shadow: to come") == 1
    assert "no promotion is under way" in timeline.page([], now=0.0)


def test_a_step_that_was_not_reached_is_said_to_come(ledger):
    history = reaching(ledger, "shadow")

    lanes = words(picture(sheets(ledger, history.run)["Steps"]))
    assert sum(text.endswith(": to come") for text in lanes) == 3


def test_decisions_of_people_have_shapes_of_their_own(ledger):
    history = reaching(ledger, "shadow")
    found = finding("shadow", "inconclusive", 150)
    history = advance_run(ledger, history, found, actor=ACTOR, now=300.0)
    given = Override("tv", "all", "Grace", "a known <slice>", 9000.0)
    history = override_cell(ledger, history, given, now=400.0)
    history = roll_back_run(ledger, history, actor="Grace", reason="enough", now=500.0)

    page = timeline.page([[*ledger.entries(history.run)]], now=600.0)

    assert 'class="m-override"' in page and 'class="m-rollback"' in page
    assert "by Grace: a known &lt;slice&gt;" in page and "by Grace: enough" in page
    assert "manual rollback" in page


def test_status_draws_it(tmp_path, ledger, failed, capsys):
    where = str(tmp_path / "ledger.db")

    main(
        ["promotion", "status", failed.run, "--ledger", where, "--format", "html"],
        standalone_mode=False,
    )

    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>") and "<script" not in page
    assert page.count('role="img"') == 3
    assert "[0.07, 0.11]" in page
