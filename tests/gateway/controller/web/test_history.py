"""The history of states, and the value that diverted a slice while it is diverted."""

import re
from dataclasses import replace

import pytest

from servanda.gateway.controller.web import page, text
from servanda.gateway.controller.web.charts import Span, span
from servanda.gateway.controller.web.lanes import lane
from servanda.gateway.http.api_keys import Holder
from servanda.gateway.routing.model import Pin
from tests.gateway.controller.web import fake

OPERATOR = Holder("otto", "operator")
FRESH = fake.broken(
    cells=(fake.cell(value=0.0333, log_evidence=0.4, log_below=1.8, n=3),), scored=3, keys=3
)
MOVES = (
    fake.transition(1, "active", "suspect", fake.NOW - 900),
    fake.transition(2, "suspect", "quarantined", fake.NOW - 760, value=0.2575),
)


def shown(html):
    return " ".join(re.sub("<[^>]+>", " ", html).replace("\n", " ").split())


def states(slice_, axis=None, **known):
    status = fake.status(slices=(slice_,), **known)
    found = lane(slice_, status, axis or span(status))
    return [(b.kind, b.would) for b in found.bands], found.says


def test_a_diverted_row_shows_the_value_that_diverted_it_and_the_fresh_one_beside_it():
    status = fake.status(slices=(FRESH,), transitions=MOVES)
    row = shown(page.page(status, OPERATOR))
    assert "0.258 , limit 0.05 tv-mean on long, at the diversion 07:47:20 (188 requests" in row
    assert "since diversion, n = 3: 0.0333 , limit 0.05" in row
    terminal = text.text(status, "URL")
    assert "0.258" in terminal
    assert "quarantined (since diversion, n = 3: 0.0333)  9 % of alarm threshold" in terminal


def test_evidence_is_per_cent_of_the_log_threshold_and_the_e_value_folds_out():
    suspect = fake.slice_("long", "suspect", log_evidence=4.3, scored=40)
    html = page.page(fake.status(slices=(suspect,)), OPERATOR)
    row = html[html.index('data-head="Evidence"') : html.index('data-head="Scored"')]
    assert "49 % of alarm threshold" in shown(row)
    assert row.index("<details") < row.index("e-value <span") and "title=" not in row


def test_the_whole_traffic_says_how_much_of_it_is_diverted():
    slices = (FRESH, fake.slice_("all", share=1.0))
    html = page.page(fake.status(slices=slices), OPERATOR)
    assert "infer, 6.0 % diverted" in html
    assert "6.0 % of all traffic diverted" in html
    watching = fake.status(slices=(replace(FRESH, acts=False), slices[1]), mode="observe")
    assert "6.0 % would be diverted" in page.page(watching, OPERATOR)


def test_a_lane_has_a_band_for_each_state():
    bands, says = states(FRESH, transitions=MOVES)
    assert bands == [("active", False), ("suspect", False), ("quarantined", False)]
    assert says.endswith("suspect since 07:45:00 → quarantined since 07:47:20")


def test_what_was_only_decided_is_hollow_until_the_slice_is_back():
    moves = (
        fake.transition(1, "suspect", "quarantined", fake.NOW - 700, acted=False),
        fake.transition(2, "quarantined", "probation", fake.NOW - 500, acted=False),
        fake.transition(3, "probation", "recovering", fake.NOW - 300, acted=False),
        fake.transition(4, "recovering", "active", fake.NOW - 100, acted=False),
    )
    bands, _ = states(fake.slice_("long"), transitions=moves, moves=4)
    assert [would for _, would in bands] == [False, True, True, True, False]
    acted = tuple(replace(t, acted=t.after != "probation") for t in moves)
    bands, _ = states(fake.slice_("long"), transitions=acted, moves=4)
    assert not any(would for _, would in bands)


def test_a_lane_claims_nothing_before_the_first_decision_that_is_known():
    bands, says = states(FRESH, transitions=MOVES[1:], moves=70)
    assert (
        bands[0][0] == "suspect" and says == "suspect since 07:47:20 → quarantined since 07:47:20"
    )
    axis = Span(fake.NOW - 3600, fake.NOW)
    bands, says = states(fake.slice_("long", since=fake.NOW - 60), axis, transitions=(), moves=70)
    assert (bands, says) == ([("active", False)], "active since 07:59:00")


def test_a_pin_to_a_kernel_is_a_state_of_its_own():
    pin = Pin("stable", "anna", "a driver", fake.NOW + 60)
    assert states(fake.slice_("long", pin=pin), transitions=(), moves=0)[0] == [("pinned", False)]


def test_each_lane_is_an_image_with_its_states_in_words():
    html = page.page(fake.status(), OPERATOR)
    assert 'role="img" aria-label="long: active since' in html
    assert html.count('<div class="lane">') == 5  # four slices, and the axis
    many = tuple(fake.slice_(f"s{i}") for i in range(20))
    assert "8 more slices" in page.page(fake.status(slices=many), OPERATOR)


@pytest.mark.parametrize(("length", "marks"), [(60, 4), (700, 3), (3600, 4)])
def test_the_axis_has_round_times(length, marks):
    axis = Span(fake.NOW - length + 1, fake.NOW + 1)
    assert len(axis.marks) == marks
    assert axis.marks[-1][1] in ("08:00:00", "08:00")
