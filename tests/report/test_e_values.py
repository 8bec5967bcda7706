# The evidence of a run at each evaluation: kept with the verdict, and drawn with both thresholds.

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from servanda.judgement.breakdown import EValuePath
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report.html_pictures import e_values
from servanda.report.html_slices import slice_words
from servanda.runner import run
from servanda.runner.sequential import _e_values
from tests import kit
from tests.report import made

GROUPS = (200, 400, 600, 800)
HOLDS = (0.5, 1.5, 3.0, 4.2)  # nats
VIOLATED = (-1.0, -0.5, -2.0, -200.0)


def verdict(*paths):
    whole = made.VERDICTS["holds"]
    return replace(whole, circumstances=replace(whole.circumstances, e_values=paths))


def panels(*paths):
    return e_values(verdict(*paths), slice_words(None))


def drawn(panel):
    return ElementTree.fromstring(panel.picture)


def lines(picture):
    """Class of each polyline -> its points, in percent from the left and from below."""
    found = {}
    for one in picture.iter("polyline"):
        points = [tuple(map(float, at.split(","))) for at in one.get("points").split()]
        found[one.get("class")] = [(x, 100 - y) for x, y in points]
    return found


def height(nats, threshold):
    """Where a log e-value stands, from minus the threshold for `violated` to twice that."""
    return 100 * (min(max(nats, -threshold), 2 * threshold) + threshold) / (3 * threshold)


def test_the_points_are_the_evaluations_and_what_is_far_is_at_the_edge():
    panel = panels(EValuePath("tv", "all", GROUPS, HOLDS, VIOLATED))[0]
    violated = math.log(2 / 0.025)

    found = lines(drawn(panel))
    for kind, nats in (("serves", HOLDS), ("aside", VIOLATED)):
        assert [y for _, y in found[kind]] == pytest.approx(
            [height(e, violated) for e in nats], abs=0.01
        )
        assert [x for x, _ in found[kind]] == pytest.approx([97 * n / 800 for n in GROUPS])
    assert found["aside"][-1][1] == 0


def test_both_thresholds_stand_where_a_cell_is_decided_and_have_their_numbers():
    picture = drawn(panels(EValuePath("tv", "all", GROUPS, HOLDS, VIOLATED))[0])
    violated = math.log(2 / 0.025)

    at = [line.get("y1") for line in picture.iter("line") if line.get("class") == "limit"]
    heights = [100 - float(y.rstrip("%")) for y in at]
    assert heights == pytest.approx(
        [height(violated, violated), height(math.log(40), violated)], abs=0.01
    )
    texts = [text.text for text in picture.iter("text")]
    assert "violated at 80" in texts and "holds at 40" in texts


def test_the_last_numbers_are_in_view():
    panel = panels(EValuePath("tv", "all", GROUPS, HOLDS, VIOLATED))[0]

    assert panel.title == "tv on whole traffic"
    assert panel.note == (
        "holds after 800 prompt groups and 4 evaluations; log e-value for holds 4.2, threshold "
        "3.69; for violated -200, threshold 4.38"
    )


def test_one_cell_needs_one_threshold_line():
    whole = replace(verdict(EValuePath("tv", "all", GROUPS, HOLDS, VIOLATED)), price_cells=1)
    picture = drawn(e_values(whole, slice_words(None))[0])

    assert "holds and violated at 40" in [text.text for text in picture.iter("text")]


def test_one_evaluation_is_two_marks_and_no_line():
    panel = panels(EValuePath("tv", "all", (832,), (4.2,), (-math.inf,)))[0]

    assert lines(drawn(panel)) == {}
    assert panel.picture.count('class="dot"') == panel.picture.count('class="m-violated"') == 1
    assert "1 evaluation;" in panel.note


def test_hostile_names_are_only_text():
    panel = panels(EValuePath(made.HOSTILE, made.HOSTILE, GROUPS, HOLDS, VIOLATED))[0]

    page = FORMATS["html"](verdict(EValuePath(made.HOSTILE, "all", GROUPS, HOLDS, VIOLATED)))
    assert "<script" not in page and "\x00" not in page and "\x1b" not in panel.picture
    drawn(panel)


def test_without_evaluations_the_page_has_no_such_section():
    assert panels() == ()
    page = FORMATS["html"](verdict())
    assert "Evidence at each evaluation" not in page and 'id="e-values"' not in page


def test_an_evaluation_without_an_e_value_is_left_out_and_not_drawn_as_none_of_evidence():
    whole = made.VERDICTS["holds"]
    cell = replace(whole.cells[0], workload="main", e_holds=2.0, e_violated=-1.0)
    looks = [
        ("main", 200, [(None, None)]),
        ("other", 300, [(9.0, 9.0)]),
        ("main", 400, [(2.0, -1.0)]),
    ]

    (path,) = _e_values(replace(whole, cells=(cell,)), looks)

    assert path == EValuePath(cell.clause, cell.slice, (400,), (2.0,), (-1.0,))
    assert _e_values(replace(whole, cells=(cell,)), looks[:2]) == ()


def test_a_measured_verdict_keeps_the_path_to_its_numbers(tmp_path):
    path, _ = kit.write(tmp_path)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    resumed = run.check(path, run_dir=tmp_path / "run", open=run.in_process)

    (found,) = verdict.circumstances.e_values
    cell = next(c for c in verdict.cells if (c.clause, c.slice) == (found.clause, found.slice))
    assert (found.e_holds[-1], found.e_violated[-1]) == (cell.e_holds, cell.e_violated)
    assert found.groups[-1] == verdict.groups and [*found.groups] == sorted({*found.groups})
    assert len(found.groups) == len(found.e_holds) == len(found.e_violated) > 1
    assert all(e < math.log(1 / verdict.alpha) for e in found.e_holds[:-1])
    assert resumed.circumstances.e_values == verdict.circumstances.e_values
    assert "Evidence at each evaluation" in FORMATS["html"](verdict)


def test_a_path_survives_json():
    data = json.loads(FORMATS["json"](verdict(EValuePath("tv", "all", GROUPS, HOLDS, VIOLATED))))
    assert Verdict.from_dict(data).circumstances.e_values[0].e_violated == VIOLATED


def test_a_verdict_without_a_path_has_no_chart():
    assert 'id="e-values"' not in FORMATS["html"](verdict())
