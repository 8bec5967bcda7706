# Pictures: well-formed, nothing outside their frame, and a value stands where it belongs.

from xml.etree import ElementTree

import pytest
from benchmarks.experiment import svg
from benchmarks.experiment.svg import Axis, Panel

SVG = "{http://www.w3.org/2000/svg}"


def test_a_value_stands_where_its_axis_puts_it():
    panel = Panel(100, 50, 200, 80, Axis(0, 50), Axis(1e-3, 1e1, log=True))

    assert (panel.x(0), panel.x(25), panel.x(50)) == (100, 200, 300)
    assert (panel.y(1e-3), panel.y(1e-1), panel.y(1e1)) == pytest.approx((130, 90, 50))


def test_what_is_not_positive_stands_at_the_start_of_a_logarithmic_axis():
    assert Axis(1e-3, 1, log=True).at(0.0) == 0.0


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0.7), (0, 1), (0.2, 0.9), (0, 50), (0, 300), (-1, 1), (0, 13)]
)
def test_ticks_are_few_round_and_inside(low, high):
    ticks = Axis(low, high).ticks(6)

    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert all(len(f"{tick:g}") <= 4 for tick in ticks)


def test_words_are_escaped_and_the_picture_says_what_it_shows():
    text = svg.picture(90, 40, "a < b", "x & y", [svg.text(1, 2, "|d| > 0.1 & so on")])

    root = ElementTree.fromstring(text)

    assert root.find(f"{SVG}title").text == "a < b"
    assert root.find(f"{SVG}text").text == "|d| > 0.1 & so on"
