# The page as a whole: who can read it, and where its parts are found.

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.judgement.breakdown import Breakdown, StepPoint, StepSeries
from servanda.judgement.token_profile import JOINT_BINS
from servanda.judgement.verdict import FORMATS
from servanda.report.format import number, rounded
from servanda.report.html_pictures import NARROW, WIDE, Scale, Tick, mark, spaced
from servanda.report.html_slices import anchors
from tests.report import made

positive = st.floats(1e-12, 1e6)


def course(limit=0.025, steps=16):
    """A series that exceeds its limit from its tenth step on."""
    points = tuple(
        StepPoint(step, 100, 0.004 if step < 10 else 0.12, 0.003, 0.2)
        if step != 5
        else StepPoint(step, 0)
        for step in range(1, steps + 1)
    )
    return StepSeries("gradient", "tv", "start-2-on", limit, 0.975, 10, points)


JOINT = {"0,0": 900, "1,1": 80, f"2,{JOINT_BINS - 1}": 1}
DRAWN = made.verdict(
    portraits={
        **made.VERDICTS["violated"].portraits,
        "infer": replace(made.portrait(), joint=JOINT),
    },
    breakdown=Breakdown(series=(course(),)),
)
VERDICTS = {**made.VERDICTS, "with pictures": DRAWN}
each_verdict = pytest.mark.parametrize("name", VERDICTS)


class Outline(HTMLParser):
    """What is where: ids, links, headings, pictures, and the text."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.headings, self.pictures, self.titles = [], [], [], [], 0
        self.text, self._heading, self._silent, self._svg = [], False, False, 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        if tag == "svg":
            if not self._svg:
                self.pictures.append(found)
            self._svg += 1
        if tag == "h2":
            assert "id" in found, "a heading without an address"
            self.headings.append("")
            self._heading = True
        self.titles += "title" in found or (tag == "title" and self._svg > 0)
        self._silent = tag in ("style", "pre", "code")

    def handle_endtag(self, tag):
        self._svg -= tag == "svg"
        self._heading = self._heading and tag != "h2"
        self._silent = False

    def handle_data(self, data):
        if self._heading:
            self.headings[-1] += data
        if not self._silent:
            self.text.append(data)


def outline(name):
    return Outline(FORMATS["html"](VERDICTS[name]))


# axes


@given(st.lists(positive, min_size=1, max_size=8), st.sampled_from([NARROW, WIDE, 700]))
def test_labels_of_an_axis_never_touch(values, width):
    boxes = sorted(tick.box(width) for tick in Scale.of(values).ticks(width))
    assert all(right < left for (_, right), (left, _) in pairwise(boxes))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.text("0.13", min_size=1, max_size=8)), max_size=30),
    st.floats(60, 1000),
)
def test_labels_that_have_room_on_a_narrow_axis_have_it_on_a_wider_one(ticks, width):
    chosen = spaced([Tick(*tick) for tick in ticks], width)
    for wider in (width, 1.3 * width, 4 * width):
        boxes = [tick.box(wider) for tick in chosen]
        for i, (left, right) in enumerate(boxes):
            assert all(right <= a or b <= left for a, b in boxes[i + 1 :])


# numbers


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_has_at_most_three_digits_that_mean_something(value):
    text = re.sub("×?10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", "", number(value)).replace(",", "").lstrip("-")
    assert has_few_digits(text) and "e" not in text


def has_few_digits(text):
    """At most three; near 1, where ratios and weights lie, its distance from 1 has two."""
    if text and abs(float(text) - 1) < 0.1:
        text, most = f"{abs(float(text) - 1):.6f}", 2
    else:
        most = 3
    return len(text.replace(".", "").strip("0")) <= most


@pytest.mark.sampled(4)
@each_verdict
def test_no_number_of_the_page_has_more_than_three_digits(name):
    """Counts are exact and limits are as the contract has them, so only decimals are looked at."""
    for text in outline(name).text:
        for found in re.findall(r"(?<![\w.,])\d+\.\d+(?![\w.])", text):
            assert has_few_digits(found), text
        assert not re.search(r"\d[eE][+-]?\d", text), text


def test_a_text_of_numbers_is_rounded_and_a_name_is_not():
    assert rounded("101.256 %") == "101 %" and rounded("step_2.3456.jsonl") == "step_2.3456.jsonl"


# places


@pytest.mark.sampled(4)
@each_verdict
def test_every_cell_and_every_section_has_a_place_and_every_link_leads_to_one(name):
    found = outline(name)
    assert len({*found.ids}) == len(found.ids)
    assert {link.removeprefix("#") for link in found.links} <= {*found.ids}
    assert {*anchors(VERDICTS[name].cells).values()} <= {*found.ids}
    assert len({*found.headings}) == len(found.headings)
    assert {"#matrix", "#numbers", "#terms"} <= {*found.links}


def test_the_place_of_a_cell_does_not_depend_on_the_others():
    cells = made.VERDICTS["violated"].cells
    alone = anchors(cells[:1])[0]
    assert alone == anchors(cells)[0] == "cell-tv-long-long"


# pictures


@pytest.mark.sampled(5)
@each_verdict
def test_every_picture_says_in_a_sentence_what_it_shows(name):
    for picture in outline(name).pictures:
        if picture.get("aria-hidden") == "true":
            continue
        assert picture["role"] == "img" and picture["aria-label"].endswith("."), picture
        assert len(picture["aria-label"].split()) >= 3


@pytest.mark.sampled(4)
@each_verdict
def test_nothing_is_said_only_to_those_who_point_at_it(name):
    assert outline(name).titles == 0


def test_the_drift_over_steps_shows_limit_interval_and_first_violation():
    page = FORMATS["html"](DRAWN)
    assert "Drift over training steps" in page and "above since step 10" in page
    assert (
        "Mean tv on start-2-on over training steps 1 to 16: 7 of 15 steps above the limit 0.025, "
        "every step since step 10; the largest is 0.12 at step 10."
    ) in page
    assert "Drift over training steps" not in FORMATS["html"](made.VERDICTS["holds"])


def test_a_long_course_is_drawn_without_intervals():
    def bars(steps):
        verdict = replace(DRAWN, breakdown=Breakdown(series=(course(steps=steps),)))
        page = FORMATS["html"](verdict)
        return page[page.index('id="steps"') : page.index('id="matrix"')].count('class="bar"')

    assert bars(16) == 15 and bars(200) == 0


def test_the_probabilities_of_both_kernels_are_drawn_where_they_were_counted():
    assert "Probabilities of both kernels" in FORMATS["html"](DRAWN)
    assert "Probabilities of both kernels" not in FORMATS["html"](made.VERDICTS["holds"])


def test_an_answer_has_a_shape_as_well_as_a_colour():
    shapes = {re.sub(r'class="[^"]*"', "", mark(tone, 50, 50)) for tone in made_tones()}
    assert len(shapes) == len(made_tones())


def made_tones():
    return ("holds", "violated", "inconclusive", "error")


def test_no_text_of_the_page_is_smaller_than_12_pixels():
    page = FORMATS["html"](made.VERDICTS["holds"])
    style = page[page.index("<style>") : page.index("@media print")]
    sizes = [float(s) for s in re.findall(r"font(?:-size)?:[^;}]*?([\d.]+)px", style)]
    assert len(sizes) > 5 and min(sizes) >= 12


# colours


def themes():
    found = re.findall(r":root\{(.*?)[;}]?(?:color-scheme[^}]*)?\}", FORMATS["html"](DRAWN))
    return [dict(re.findall(r"--(\w+):(#\w{6})", theme)) for theme in found]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", range(3), ids=["light", "dark", "print"])
def test_colours_have_contrast_enough(theme):
    """WCAG 2.2: 4.5 to 1 for text (1.4.3), 3 to 1 for what a picture is read by (1.4.11)."""
    assert len(themes()) == 3
    colours = themes()[theme]
    for paper in ("bg", "card"):
        for ink in ("fg", "mu", "bad", "ok", "open"):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    for heat in ("u1", "u2", "u3", "u4"):
        for ink in ("fg", "bad", "ok"):
            assert contrast(colours[ink], colours[heat]) >= 4.5, (ink, heat)
    for part in ("ax", "bad", "ok", "open", "fg"):
        assert contrast(colours[part], colours["bg"]) >= 3, part
    assert contrast(colours["ax"], colours["clip"]) >= 3  # columns on the shaded range
    assert contrast(colours["bad"], colours["ok"]) >= 1.5  # told apart in greyscale as well
