# The timeline of a promotion as a page: steps, traffic, evaluations and approvals.

import re
import xml.etree.ElementTree as ElementTree

import pytest

from servanda.cli.main import main
from servanda.promotion.ledger.open import open_ledger
from servanda.promotion.run import timeline
from servanda.promotion.run.record import advance_run
from tests.promotion.run.histories import ACTOR, LEGS, finding, reaching


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(str(tmp_path / "ledger.db")) as found:
        yield found


@pytest.fixture
def failed(ledger):
    """A promotion that was approved, and violated in full."""
    history = reaching(ledger, "full-1")
    return advance_run(ledger, history, finding("full-1", "violated"), actor=ACTOR, now=900.0)


def picture(ledger, run, now=1000.0):
    text = timeline.svg([*timeline.moments(ledger.entries(run))], now=now)
    return ElementTree.fromstring(text)


def words(element):
    return [text for text in element.itertext() if text.strip()]


def test_it_is_one_image_with_a_label_and_a_lane_for_each_step(ledger, failed):
    drawn = picture(ledger, failed.run)

    assert drawn.get("role") == "img"
    assert drawn.get("aria-label") == f"Timeline of {failed.run}: rolled_back on full-1"
    assert [text for text in words(drawn) if text in LEGS] == [*LEGS]
    assert len(drawn.findall("rect")) == 5


def test_every_evaluation_and_approval_has_a_mark_with_its_words(ledger, failed):
    titles = [str(title.text) for title in picture(ledger, failed.run).iter("title")]

    assert f"approval by {ACTOR}: it looks well" in titles
    assert [title.split(":")[0] for title in titles].count("holds") == 5
    assert sum(title.startswith("violated: tv on all is violated (tv on all") for title in titles)


def test_the_share_of_traffic_ends_at_none_after_a_rollback(ledger, failed):
    paths = picture(ledger, failed.run).iter("path")
    serves = next(path for path in paths if path.get("class") == "serves")

    heights = [float(y) for y in re.findall(r"(?:V|M[0-9.]+ )([0-9.]+)", serves.get("d", ""))]
    assert min(heights) == 24.0 and heights[0] == heights[-1] == 114.0


def test_a_step_that_was_not_reached_is_said_to_come(ledger):
    history = reaching(ledger, "shadow")

    assert words(picture(ledger, history.run)).count("to come") == 3


def test_status_draws_it(tmp_path, ledger, failed, capsys):
    where = str(tmp_path / "ledger.db")

    main(
        ["promotion", "status", failed.run, "--ledger", where, "--format", "html"],
        standalone_mode=False,
    )

    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>") and "<script" not in page
    assert page.count('<svg role="img"') == 1
    assert "[0.07, 0.11]" in page
