# One number is printed alike wherever it is read.

import re
from html import unescape

import pytest

from servanda.contract.stages import Leg
from servanda.judgement.verdict import FORMATS
from servanda.promotion.advance import effects_of
from servanda.promotion.notify.slack import lines
from servanda.promotion.run.report import cell_text
from servanda.promotion.state import CellResult, State
from servanda.report.format import count, number, part_of, percent
from servanda.report.summary import headline
from tests.report import made

MEAN = made.cell("violated", slice="long", value=0.18704, interval=(0.13909, 0.23991), limit=0.015)
SHARE = made.cell(
    "violated",
    clause="tail",
    metric="abs_log_ratio_nats",
    aggregate="p99",
    slice="long",
    threshold=0.2,
    value=0.0618,
    interval=(0.0421, 0.0853),
    limit=0.03,
)


def words(text):
    """A page as it is read: no tags, and no marks of Markdown."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", text)).replace("\\", ""))


def told(cell):
    """The notification of a promotion that this cell decided."""
    course = (Leg("offline"), Leg("canary", share=0.25))
    state = State("run", made.verdict().key, leg=1)
    asked = effects_of(course, None, state, CellResult.of(cell), ())
    return "\n".join("\n".join(lines(effect)) for effect in asked if effect.kind == "notify")


@pytest.mark.parametrize(
    "cell, printed",
    [
        (MEAN, ("0.187", "[0.139, 0.24]", "0.015")),
        (SHARE, ("6.2 %", "[4.2 %, 8.5 %]", "3 %")),
    ],
    ids=["mean", "share"],
)
def test_value_interval_and_limit_are_one_text_on_every_surface(cell, printed):
    verdict = made.verdict("violated", cells=[cell])
    surfaces = {name: words(FORMATS[name](verdict)) for name in ("text", "markdown", "html")}
    surfaces |= {"notification": told(cell), "promotion": cell_text(CellResult.of(cell))}
    for surface, text in surfaces.items():
        assert all(one in text for one in printed), (surface, text)


def test_beyond_the_whole_a_share_is_a_ratio():
    assert percent(1.649) == "1.65 times" and percent(float("inf")) == "∞ times"
    assert part_of(0.25, "its budget") == "25.0 % of its budget"
    assert part_of(1.649, "its budget") == "1.65 times its budget"


def test_near_1_a_number_shows_how_far_it_is_from_1():
    assert number(0.99874) == "0.9987" and number(0.99999) == "0.99999"


@pytest.mark.parametrize(
    "n, printed",
    [(0, "0 prompt groups"), (1, "1 prompt group"), (2, "2 prompt groups")],
)
def test_one_thing_is_no_plural(n, printed):
    assert count(n, "prompt group") == printed


def test_no_report_counts_one_thing_as_many():
    cells = [made.cell("violated", n=1, more=None), made.cell("inconclusive", slice="long", more=1)]
    verdict = made.verdict("violated", cells=cells, tokens=1, groups=1, sequences=1, lost=1)
    for format_ in ("text", "markdown", "html", "github"):
        text = words(FORMATS[format_](verdict))
        assert not re.search(r"(?<![\w.,] )\b1 (more )?(groups|prompt groups|sequences)\b", text), (
            text
        )


def test_steps_are_counted_as_steps_and_slices_as_slices():
    steps = ((10, 10), (12, 12), (13, 14))
    cells = [
        made.cell("violated", slice="start-2-on"),
        *(made.cell("violated", steps=span) for span in steps),
        made.cell("holds"),
    ]
    told = str(headline(made.verdict("violated", cells=cells)))
    assert "breaks slice start-2-on and 4 steps (10, 12 and others). The whole traffic hold" in told
