# Samples needed against the true value: in the page of a plan, and in the documentation.

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from benchmarks import sizes as printed_sizes
from scripts import power_curve

from servanda.cli.main import main
from servanda.cli.plan import plan_page, power_picture, sizes
from servanda.judgement.cost import cost_of
from servanda.judgement.cost import power_curve as curve_of
from servanda.report.html_pictures import Scale
from servanda.runner import run
from tests import kit


@pytest.fixture
def plan(tmp_path):
    path, _ = kit.write(tmp_path)
    return run.compile(run.load(path))


def percent(element, *names):
    return [float(element.get(name).rstrip("%")) for name in names]


def test_sizes_are_around_the_planned_one_which_is_one_of_them():
    assert 1024 in sizes(1024) and min(sizes(1024)) == 10 and max(sizes(1024)) == 102_400
    assert min(sizes(3)) == 2 and [*sizes(3)] == sorted({*sizes(3)})


def test_the_marks_are_what_each_size_decides(plan):
    cell = cost_of(plan).decides[0]
    points = curve_of(plan, cell, sizes(cell.n))
    assert next(p for p in points if p.n == cell.n) == cell  # as the table has it

    picture = ElementTree.fromstring(power_picture(points, cell.n))

    up = Scale.of([p.n for p in points])
    for names, kind, of in (
        (("cx", "cy"), "circle", lambda p: p.holds),
        (("x", "y"), "svg", lambda p: p.violated),
    ):
        shown = [
            (100 * of(p) / cell.limit / 3, 100 - up.at(p.n))
            for p in points
            if of(p) is not None and of(p) <= 3 * cell.limit
        ]
        marks = [m for m in picture.iter(kind) if m.get("class") in ("dot", "mark")]
        assert [percent(mark, *names) for mark in marks] == [
            pytest.approx(at, abs=0.01) for at in shown[::2]
        ]


def test_the_limit_and_the_size_of_the_plan_are_marked(plan):
    cell = cost_of(plan).decides[0]
    points = curve_of(plan, cell, sizes(cell.n))
    picture = ElementTree.fromstring(power_picture(points, cell.n))

    limit = next(line for line in picture.iter("line") if line.get("class") == "limit")
    planned = next(line for line in picture.iter("line") if line.get("class") == "aside")
    assert percent(limit, "x1", "x2") == pytest.approx([33.33, 33.33])
    level = 100 - Scale.of([p.n for p in points]).at(cell.n)
    assert percent(planned, "y1", "y2") == pytest.approx([level, level], abs=0.01)
    texts = [text.text for text in picture.iter("text")]
    assert f"limit {cell.limit:g}" in texts and f"{cell.n:,} {cell.units}" in texts


def test_one_size_is_drawn(plan):
    cell = cost_of(plan).decides[0]

    picture = power_picture([replace(cell, holds=None, holds_even=None)], cell.n)

    assert "<polyline" not in picture and "decide holds up to never" in picture


def test_a_plan_without_statistical_clauses_has_a_page_too(plan):
    cost = replace(cost_of(plan), decides=())
    page = plan_page(plan, cost)

    assert page.startswith("<!doctype html>") and "<section" not in page


def test_plan_prints_the_page(tmp_path, capsys):
    path, _ = kit.write(tmp_path)

    main(["contract", "plan", str(path), "--no-probe", "--format", "html"], standalone_mode=False)

    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>") and "<script" not in page
    assert page.count('role="img"') == 1 and "tv on all" in page
    assert "holds if at most" in page  # the table has the same numbers


def test_the_picture_of_the_documentation_is_in_step_with_the_code():
    assert power_curve.TARGET.read_text("utf-8") == power_curve.picture(), (
        "run python scripts/power_curve.py"
    )


def test_it_shows_the_numbers_of_its_page():
    page = power_curve.TARGET.with_suffix(".md").read_text("utf-8")
    row = re.findall(r"^\| 0\.03 \|.*….*$", page, re.M)

    for line, (units, n) in zip(row, (("tokens", 24_576), ("prompt groups", 1_024)), strict=True):
        assert "{} ({}) … {} ({})".format(*printed_sizes.printed(power_curve.LIMIT, n)) in line
        label = f"Number of {units} needed"
        assert label in power_curve.TARGET.read_text("utf-8")


def test_the_picture_carries_its_own_colours_and_letters_that_can_be_read():
    text = power_curve.TARGET.read_text("utf-8")

    ElementTree.fromstring(text)
    assert "<title>" in text and 'role="img"' in text and "prefers-color-scheme:dark" in text
    assert "svg text{font-size:13px}" in text and "http" not in text.replace(
        "http://www.w3.org/2000/svg", ""
    )
