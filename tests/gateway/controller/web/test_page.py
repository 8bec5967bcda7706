"""The page: its tables, and that nothing on it can be made to act."""

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from servanda.errors import ContractError
from servanda.gateway.controller.status import (
    ControllerStatus,
    PoolStatus,
    ReplicaStatus,
    ScoringStatus,
)
from servanda.gateway.controller.web import summary
from servanda.gateway.controller.web.app import fragment, whole_page
from servanda.gateway.controller.web.summary import text as terminal
from servanda.gateway.http.api_keys import Holder
from servanda.gateway.routing.model import STATUSES, Pin
from servanda.traces.serialization import from_plain, to_plain
from tests.gateway.controller.web import fake
from tests.kit import parse

VIEWER, OPERATOR = Holder("vera", "viewer"), Holder("otto", "operator")
QUIET = fake.status().slices[1:]
YOUNG = fake.slice_("young", scored=1, cells=(fake.cell(log_below=0.1, n=1, more=69),))
LATER = fake.slice_("later", scored=9, cells=(fake.cell(log_below=0.1, n=9, more=90),))
NEW = fake.slice_("new", scored=0, keys=0)


def pinned(to, **more):
    return fake.slice_("domain=math", pin=Pin(to, "anna", "a new driver", fake.NOW + 7200), **more)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"slices": QUIET}, "✓ 3 active, within limits"),
        ({}, "✗ 1 quarantined · 3 active, within limits"),
        (
            {"slices": (fake.broken(acts=False), *QUIET[:1]), "mode": "observe"},
            "✗ 1 would be quarantined · 1 active, within limits",
        ),
        (
            {"slices": (*QUIET, fake.broken(status="suspect", held="no room"))},
            "✗ 1 above its limit · 3 active, within limits",
        ),
        ({"slices": (fake.broken(), NEW)}, "✗ 1 quarantined · 1 without evidence"),
        (
            {"slices": (YOUNG, *QUIET)},
            "? 1 active, gathering: 1 of about 70 requests · 3 active, within limits",
        ),
        (
            {"slices": (YOUNG, LATER)},
            "? 2 active, gathering: 9 of about 99 requests on the slowest",
        ),
        ({"slices": (*QUIET, NEW, NEW)}, "? 2 without evidence · 3 active, within limits"),
        ({"slices": (pinned("stable"), *QUIET)}, "● 1 pinned to stable · 3 active, within limits"),
        ({"slices": ()}, "? no slice is watched"),
        ({"slices": (fake.slice_("a", cells=()),)}, "– 1 not watched"),
    ],
)
def test_the_first_line_counts_the_slices_by_state_the_worst_first(known, text):
    head = summary.headline(fake.status(**known))
    assert f"{head.glyph} {head.text}" == text


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (fake.slice_("a"), "✓ active, within limits"),
        (YOUNG, "? active, gathering: 1 of about 70 requests"),
        (fake.broken(status="active"), "✗ above its limit"),
        (fake.slice_("a", scored=0), "? without evidence"),
        (fake.slice_("a", cells=()), "– not watched"),
        (fake.slice_("a", "suspect"), "? suspect"),
        (fake.broken(status="suspect"), "✗ above its limit"),
        (fake.slice_("a", "quarantined", acts=True), "✗ quarantined"),
        (fake.slice_("a", "quarantined"), "✗ would be quarantined"),
        (fake.slice_("a", "probation", acts=True), "✗ probation"),
        (fake.slice_("a", "recovering", acts=True), "↗ recovering"),
        (pinned("stable"), "● pinned to stable"),
        (pinned("infer"), "● pinned to infer"),
        (pinned("enforce"), "✓ active, within limits"),
    ],
)
def test_a_state_has_a_word_and_a_glyph_and_not_colour_alone(one, said):
    state = summary.state(one)
    assert f"{state.glyph} {state.text}" == said


@pytest.mark.parametrize(
    ("one", "base", "who"),
    [
        (fake.slice_("a"), 1.0, "infer"),
        (fake.slice_("a"), 0.05, "infer 5.0 %"),
        (fake.broken(), 1.0, "stable"),
        (fake.broken(acts=False), 1.0, "infer"),
        (fake.slice_("a", "recovering", acts=True, route=0.25), 1.0, "infer 25.0 %"),
        (pinned("stable"), 1.0, "stable"),
        (pinned("infer", status="quarantined", acts=True, route=0.0), 0.2, "infer"),
    ],
)
def test_a_row_says_who_serves_it_now(one, base, who):
    assert summary.served_by(one, fake.status(slices=(one,), base=base)) == who


PINNED = {to: Pin(to, "a", "b", fake.NOW + 1) for to in ("stable", "infer")}
ALL = fake.slice_("all", "quarantined", acts=True, route=0.0)


@pytest.mark.parametrize(
    ("one", "whole", "who", "meant"),
    [
        (fake.slice_("a"), ALL, "stable", "stable"),
        (fake.slice_("a"), replace(ALL, acts=False), "infer", "stable"),
        (fake.slice_("a"), replace(ALL, route=0.25), "infer 25.0 %", "infer 25.0 %"),
        (fake.slice_("a", pin=PINNED["infer"]), ALL, "infer", "infer"),
        (
            fake.slice_("a", pin=PINNED["infer"]),
            replace(ALL, pin=PINNED["stable"]),
            *2 * ["stable"],
        ),
        (fake.slice_("a"), fake.slice_("all", pin=PINNED["stable"]), "stable", "stable"),
        (fake.broken("a"), fake.slice_("all", pin=PINNED["infer"]), "infer", "infer"),
    ],
)
def test_where_the_whole_traffic_goes_there_goes_every_slice_of_it(one, whole, who, meant):
    """As the router has it: a person's word before a decision, and stable before infer."""
    at = fake.status(slices=(one, whole))
    assert (summary.served_by(one, at), summary.served_by(one, at, if_acted=True)) == (who, meant)


def test_what_a_promotion_does_not_give_infer_is_no_decision_of_ours():
    one = fake.slice_("a")
    at = fake.status(slices=(one,), base=0.05)
    assert summary.served_by(one, at, if_acted=True) == "infer 5.0 %"


def test_the_worst_slice_comes_first_and_the_whole_last():
    slices = (
        fake.slice_("all"),
        fake.slice_("near", log_evidence=5.0),
        fake.slice_("calm"),
        fake.slice_("back", "recovering"),
        fake.slice_("odd", "suspect"),
        fake.broken(),
        pinned("infer"),
    )
    found = [slice_.name for slice_ in summary.ordered(slices)]
    assert found == ["domain=math", "long", "odd", "back", "near", "calm", "all"]


def test_how_tokens_are_drawn_comes_first_only_where_it_is_suspicious():
    drawn = fake.cell("sampler_fidelity", -0.3, 2.0, limit=0.0, unit="nats", refutes=True)
    one = fake.slice_("a", cells=(drawn, fake.cell(log_evidence=0.1)))
    assert summary.worst(one) is one.cells[1]

    bad = replace(drawn, log_evidence=5.0)
    assert summary.worst(replace(one, cells=(bad, one.cells[1]))) is bad
    assert "sampler_fidelity -0.3 nats -0.24 to -0.36 – 0.0004" in shown(
        fake.status(slices=(replace(one, cells=(bad,)),))
    )


def shown(status, holder=OPERATOR):
    """The text of the page."""
    text = re.sub("<[^>]+>", " ", whole_page(status, holder))
    return " ".join(text.replace("\n", " ").split())


def test_the_page_shows_what_a_person_needs():
    text = shown(fake.status())
    for part in (
        "✗ 1 quarantined · 3 active, within limits mode enforce · traffic is served by infer, "
        "6.0 % diverted; decisions are acted on · scored 1,912 of 41,300 requests",
        "! observers failed, and no answer changed (capture 3)",
        "6.0 % of all traffic diverted",
        "long 6.0 % ✗ quarantined 12 min 40 s stable replies: infer 1,120, stable 380",
        "tv-mean 0.173 0.05 1.046 times the threshold 188 27 users",
        "whole traffic 100 % ✓ active, within limits 12 min 40 s infer, 6.0 % diverted",
        "long tv-mean 0.173 0.138 to 0.207 0.05 0.0004 8,955 6,000 &lt; 0.001 120 188",
        "07:47:20 long suspect → quarantined tv-mean on long is above its limit 0.173 0.05 8,955",
        "infer 30,890 12 31 64 33 –",
        "stable 400 3 9 16 7 20 failed over from infer (5xx 20) · 81 before the first route",
        "otto (operator)",
    ):
        assert part in text, part


def test_what_would_be_served_is_shown_beside_what_is():
    slices = (fake.broken(acts=False), fake.slice_("all", share=1.0))
    text = shown(fake.status(slices=slices, mode="observe"))
    assert "infer, would be stable replies: infer 1,120, stable 380" in text
    assert "infer, would be infer, 6.0 % diverted" in text
    assert "6.0 % would be diverted" in text


def test_problems_come_first():
    bad = {
        "store": "the store is locked",
        "ledger": "the ledger is full",
        "reload": "contract.yaml:1:1: no",
        "scoring": ScoringStatus(problem="the train kernel ended"),
    }
    html = fragment(fake.status(**bad), VIEWER)
    assert "4 problems" in html
    assert html.index("4 problems") < html.index("<h1")
    for text in ("the store is locked", "the ledger is full", "contract.yaml:1:1: no"):
        assert text in html
    assert "problems</h2>" not in fragment(fake.status(), VIEWER)


def test_a_contract_that_is_refused_is_told_on_one_line_without_the_line_of_its_text():
    with pytest.raises(ContractError) as found:
        parse("apiVersion: x\nrouting: {mod: enforce}\n", "c.yaml", engines=["table"])
    assert str(found.value).count("^") > 1
    told = summary.problem(str(found.value), 4000)
    assert "c.yaml:2:11: routing has no key 'mod' hint: did you mean 'mode'?" in told
    assert "^" not in told and " | " not in told


def test_only_who_may_pin_is_offered_a_pin():
    assert "data-act" in whole_page(fake.status(), OPERATOR)
    for html in (whole_page(fake.status(), VIEWER), fragment(fake.status(), VIEWER)):
        assert "<button" not in html and "<form" not in html and "<dialog" not in html


HOSTILE = [
    '"><script>alert(1)</script>',
    "'\" onmouseover='alert(1)'",
    "{{ 7 * 7 }}{% for x in s %}",
    "\u202etxet desrever",
    "x" * 200,
    "</table></main><img src=x onerror=alert(1)>",
    "a\x00b\x1b[31m\x7f",
    "<!--",
    "javascript:alert(1)",
    "漢字" * 100,
]


def counted(text):
    return {"decisions": {text: 1}, "launched": 3, "unsampled": {text: 2}, "log": text}


def hostile(text):
    bad = fake.cell(clause=text, unit=text, log_evidence=9.0)
    one = fake.broken(
        name=text,
        cells=(bad, bad),
        held=text,
        pin=Pin("stable", text, text, fake.NOW + 60),
        served={text: 5, "infer": 3},
    )
    step = fake.transition(1, text, text, reason=text, actor=text, cell=text)
    return fake.status(
        name=text,
        contract=text,
        run=text,
        leg=text,
        slices=(one,),
        transitions=(step,),
        store=text,
        ledger_where=text,
        gateways=(fake.gateway(name=text, counts=counted(text)),),
        scoring=ScoringStatus(outside={text: 3}, problem=text),
    )


def test_a_replica_that_is_not_used_is_a_problem_with_its_reason():
    out = ReplicaStatus("http://b", out_at=1, why="another kernel: model 'x', not 'm'")
    pool = PoolStatus(replicas=(ReplicaStatus("http://a", used_at=1), out))
    one = fake.status(pools={"infer": pool})

    (said,) = one.problems
    assert said == "a replica of infer is not used, http://b: another kernel: model 'x', not 'm'"
    assert "1 of 2 replicas used" in shown(one)
    assert f"! {said}" in terminal(one, "http://leader")
    assert "infer 0 in flight, 1 of 2 replicas used" in terminal(one, "http://leader")


def test_a_log_that_takes_no_rows_is_a_problem():
    full = fake.gateway(name="g1", counts={"log": "No space left on device"})
    one = fake.status(gateways=(full, fake.gateway(name="g2", counts={"log": ""})))

    said = "gateway g1 cannot write its request log: No space left on device"
    assert [text for text in one.problems if "log" in text] == [said]
    assert said in whole_page(one, OPERATOR)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_shown_and_does_nothing(text):
    html = whole_page(hostile(text), OPERATOR)

    assert "<script>" not in html and "<img" not in html and "<!--" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", html)
    assert html.count("<table") == html.count("</table>") == 4
    # well formed but for what HTML closes by itself: every name stands inside its own attribute
    body = html[html.index("<main") : html.index("</main>") + len("</main>")]
    body = re.sub(r"<noscript>.*?</noscript>", "", body)
    tree = ET.fromstring(re.sub(r"<(br)>", r"<\1/>", body).replace("&nbsp;", " "))
    for element in tree.iter():
        assert not [name for name in element.attrib if name.startswith("on") or name == "style"]
        assert element.tag not in ("script", "img", "a")


@pytest.mark.parametrize("log_e", [-math.inf, 0.0, 800.0, math.inf, math.nan])
def test_odd_numbers_are_printed(log_e):
    one = fake.slice_("a", cells=(fake.cell(log_evidence=log_e),))
    assert "nan" not in fragment(fake.status(slices=(one,)), VIEWER)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("mode", ["observe", "enforce"])
@pytest.mark.parametrize("acts", [True, False])
def test_every_state_has_a_page(status, mode, acts):
    one = fake.slice_("a", status, acts=acts, share=None, served={}, cells=())
    bare = fake.status(slices=(one,), mode=mode, gateways=(), pools={}, began=0.0)
    assert "<h1" in whole_page(bare, OPERATOR)


def test_a_standing_travels_as_json():
    status = fake.status()
    assert to_plain(from_plain(ControllerStatus, to_plain(status))) == to_plain(status)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (("suspect", "quarantined", True), "suspect → quarantined"),
        (("suspect", "quarantined", False), "suspect → would be quarantined"),
        (("active", "suspect", False), "active → suspect"),
        (("suspect", "suspect", False), "suspect"),
        (("active", "active, pinned to stable", True), "active → active, pinned to stable"),
    ],
)
def test_a_decision_says_whether_anything_was_moved(step, text):
    before, after, acted = step
    one = fake.transition(3, before, after, acted=acted)
    assert f">{text}</td>" in fragment(fake.status(transitions=(one,), moves=3), VIEWER)
