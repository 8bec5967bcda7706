"""The page: its sentence, and that nothing on it can be made to act."""

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
from servanda.gateway.controller.web import page, phrases
from servanda.gateway.controller.web.charts import HEIGHT, WIDTH, served_parts, span, spark
from servanda.gateway.controller.web.text import text as terminal
from servanda.gateway.http.api_keys import Holder
from servanda.gateway.routing.model import STATUSES, Pin
from servanda.traces.serialization import from_plain, to_plain
from tests.gateway.controller.web import fake
from tests.kit import parse

VIEWER, OPERATOR = Holder("vera", "viewer"), Holder("otto", "operator")
QUIET = fake.status().slices[1:]
YOUNG = fake.slice_("young", scored=1, cells=(fake.cell(log_below=0.1, n=1),))
NEW = fake.slice_("new", scored=0, keys=0, history=())


def pinned(to, **more):
    return fake.slice_("domain=math", pin=Pin(to, "anna", "a new driver", fake.NOW + 7200), **more)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (
            {"slices": QUIET},
            "✓ All 3 slices are within their limits.",
        ),
        ({"slices": QUIET[:1]}, "✓ domain=code is within its limits."),
        ({}, "✗ long is served by stable. The other 3 slices are within their limits."),
        (
            {"slices": (fake.broken(acts=False), *QUIET[:1]), "mode": "observe"},
            "✗ long would be served by stable. The other slice is within its limits.",
        ),
        (
            {"slices": (fake.broken(status="suspect", held="not diverted: no room"), *QUIET)},
            "✗ long exceeds its limit and stays on the infer kernel. "
            "The other 3 slices are within their limits.",
        ),
        (
            {"slices": (fake.broken(), NEW)},
            "✗ long is served by stable. 1 other slice is not decided yet.",
        ),
        (
            {"slices": (fake.slice_("all", "quarantined", acts=True), NEW, fake.slice_("b"))},
            "✗ The whole traffic is served by stable. 1 of 2 other slices is within its limits.",
        ),
        ({"slices": (YOUNG, *QUIET)}, "✓ All 4 slices show no evidence of a violation."),
        ({"slices": (YOUNG,)}, "✓ young shows no evidence of a violation."),
        (
            {"slices": (YOUNG, NEW)},
            "? 1 of 2 slices shows no evidence of a violation; new has no evidence yet.",
        ),
        (
            {"slices": (fake.broken(), YOUNG)},
            "✗ long is served by stable. The other slice shows no evidence of a violation.",
        ),
        (
            {"slices": (fake.broken(), YOUNG, NEW, *QUIET)},
            "✗ long is served by stable. 4 of 5 other slices show no evidence of a violation.",
        ),
        ({"slices": QUIET[2:]}, "✓ The whole traffic is within its limits."),
        (
            {"slices": (fake.broken(), NEW, *QUIET)},
            "✗ long is served by stable. 3 of 4 other slices are within their limits.",
        ),
        (
            {"slices": (pinned("stable"), *QUIET)},
            "✗ domain=math is served by stable. The other 3 slices are within their limits.",
        ),
        (
            {"slices": (fake.broken(pin=Pin("infer", "a", "b", fake.NOW + 1)), *QUIET[:1])},
            "? long is quarantined.",
        ),
        (
            {"slices": (NEW, *QUIET)},
            "? 3 of 4 slices are within their limits; new has no evidence yet.",
        ),
        ({"slices": (NEW,)}, "? No slice has evidence yet; the infer kernel serves."),
        ({"slices": ()}, "? No slice of this contract is watched here."),
        (
            {"slices": (fake.slice_("tools", "suspect"), *QUIET)},
            "? tools is suspect.",
        ),
        (
            {"slices": (fake.slice_("a", "suspect"), fake.slice_("b", "recovering"), *QUIET)},
            "? a and b are suspect or recovering.",
        ),
    ],
)
def test_the_first_line_says_how_things_stand(known, text):
    head = phrases.headline(fake.status(**known))
    assert f"{head.glyph} {head.text}" == text


def test_many_slices_are_named_and_then_counted():
    away = tuple(fake.slice_(f"s{i}", "quarantined", acts=True) for i in range(7))
    head = phrases.headline(fake.status(slices=away))
    assert head.text == "s0, s1, s2 and 4 more are served by stable."


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (fake.slice_("a"), "✓ active"),
        (fake.slice_("a", scored=0), "? no evidence yet"),
        (fake.slice_("a", cells=()), "– not watched"),
        (fake.slice_("a", "suspect"), "? suspect"),
        (fake.broken(status="suspect"), "✗ exceeds its limit"),
        (fake.slice_("a", "quarantined", acts=True), "✗ quarantined"),
        (fake.slice_("a", "quarantined"), "✗ would be quarantined"),
        (fake.slice_("a", "probation", acts=True), "✗ probation"),
        (fake.slice_("a", "recovering", acts=True), "↗ recovering"),
        (pinned("stable"), "● pinned to stable"),
        (pinned("infer"), "● pinned to infer"),
        (pinned("enforce"), "✓ active"),
    ],
)
def test_a_state_has_a_word_and_a_glyph_and_not_colour_alone(one, said):
    glyph, state, _ = phrases.state(one)
    assert f"{glyph} {state}" == said


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
    assert phrases.served_by(one, fake.status(slices=(one,), base=base)) == who


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
    assert (phrases.served_by(one, at), phrases.served_by(one, at, if_acted=True)) == (who, meant)


def test_what_a_promotion_does_not_give_infer_is_no_decision_of_ours():
    one = fake.slice_("a")
    assert (
        phrases.served_by(one, fake.status(slices=(one,), base=0.05), if_acted=True)
        == "infer 5.0 %"
    )


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
    found = [row["slice"].name for row in page.rows(fake.status(slices=slices))]
    assert found == ["domain=math", "long", "odd", "back", "near", "calm", "all"]


def test_the_page_shows_what_a_person_needs():
    html = page.page(fake.status(), OPERATOR)
    for text in (
        "0.173",
        "limit 0.05",
        "8,955",
        "6,000",
        "27 users",
        "6.0 %",
        "stable 0.0063",
        "suspect → quarantined",
        "tv-mean on long is above its limit",
        "14 of 512 rows queued",
        "gateway-1",
        "room for 7",
        "1 cell (clause on a slice) of the contract that routing does not watch",
        "otto (operator)",
    ):
        assert text in html, text


def test_problems_come_first():
    bad = {
        "store": "the store is locked",
        "ledger": "the ledger is full",
        "reload": "contract.yaml:1:1: no",
        "scoring": ScoringStatus(problem="the train kernel ended"),
    }
    html = page.fragment(fake.status(**bad), VIEWER)
    assert "4 problems" in html
    assert html.index("4 problems") < html.index("<h1")
    for text in ("the store is locked", "the ledger is full", "contract.yaml:1:1: no"):
        assert text in html
    assert "problems</h2>" not in page.fragment(fake.status(), VIEWER)


def test_a_contract_that_is_refused_is_told_on_one_line_without_the_line_of_its_text():
    with pytest.raises(ContractError) as found:
        parse("apiVersion: x\nrouting: {mod: enforce}\n", "c.yaml", engines=["table"])
    assert str(found.value).count("^") > 1
    told = phrases.problem(str(found.value), 4000)
    assert "c.yaml:2:11: routing has no key 'mod' hint: did you mean 'mode'?" in told
    assert "^" not in told and " | " not in told


def test_only_who_may_pin_is_offered_a_pin():
    assert "data-act" in page.page(fake.status(), OPERATOR)
    for html in (page.page(fake.status(), VIEWER), page.fragment(fake.status(), VIEWER)):
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


def test_why_requests_are_no_evidence_is_shown_the_most_frequent_first():
    counts = {name: {"unsampled": {f"why {name}{i}": i for i in range(1, 5)}} for name in "ab"}
    counts["a"]["unsampled"]["stop"] = counts["b"]["unsampled"]["stop"] = 900
    gateways = tuple(fake.gateway(name=name, counts=told) for name, told in counts.items())

    html = page.page(fake.status(gateways=gateways), OPERATOR)

    assert (
        "sampled, but no evidence: 1,800 stop · 4 why a4 · 4 why b4 · 3 why a3 · 3 why b3" in html
    )
    assert "4 more reasons" in html
    silent = page.page(fake.status(gateways=(fake.gateway(counts={}),)), OPERATOR)
    assert "sampled, but no evidence" not in silent


def test_a_replica_that_is_not_used_is_a_problem_with_its_reason():
    out = ReplicaStatus("http://b", out_at=1, why="another kernel: model 'x', not 'm'")
    pool = PoolStatus(replicas=(ReplicaStatus("http://a", used_at=1), out))
    one = fake.status(pools={"infer": pool})

    (said,) = one.problems
    assert said == "a replica of infer is not used, http://b: another kernel: model 'x', not 'm'"
    assert "1 of 2 replicas used" in page.page(one, OPERATOR)
    assert f"! {said}" in terminal(one, "http://leader")
    assert "infer 0 in flight, 1 of 2 replicas used" in terminal(one, "http://leader")


def test_a_log_that_takes_no_rows_is_a_problem():
    full = fake.gateway(name="g1", counts={"log": "No space left on device"})
    one = fake.status(gateways=(full, fake.gateway(name="g2", counts={"log": ""})))

    said = "gateway g1 cannot write its request log: No space left on device"
    assert [text for text in one.problems if "log" in text] == [said]
    assert said in page.page(one, OPERATOR)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_shown_and_does_nothing(text):
    html = page.page(hostile(text), OPERATOR)

    assert "<script>" not in html and "<img" not in html and "<!--" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", html)
    assert html.count("<table") == html.count("</table>") == 1
    # well formed but for what HTML closes by itself: every name stands inside its own attribute
    body = html[html.index("<main") : html.index("</main>") + len("</main>")]
    body = re.sub(r"<noscript>.*?</noscript>", "", body)
    tree = ET.fromstring(re.sub(r"<(br)>", r"<\1/>", body).replace("&nbsp;", " "))
    for element in tree.iter():
        assert not [name for name in element.attrib if name.startswith("on") or name == "style"]
        assert element.tag not in ("script", "img", "a")


def test_odd_numbers_are_drawn_within_the_frame():
    for history in ((), ((0.0, math.nan),), ((fake.NOW, 5e300), (fake.NOW, -1e9)), ((9e99, 0.1),)):
        for log_e in (-math.inf, 0.0, 800.0, math.inf, math.nan):
            one = fake.slice_("a", history=history, cells=(fake.cell(log_evidence=log_e),))
            drawn = spark(one, one.cells[0], span(fake.status(slices=(one,))))
            assert drawn is not None
            for point in drawn.points.split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
            assert "nan" not in page.fragment(fake.status(slices=(one,)), VIEWER)


def test_a_long_history_keeps_its_peaks():
    begin = fake.NOW - 3000
    history = tuple((begin + 0.3 * i, 1.2 if i == 777 else 0.1) for i in range(10_000))
    one = fake.slice_("a", history=history)
    drawn = spark(one, one.cells[0], span(fake.status(slices=(one,))))
    assert drawn is not None
    heights = [float(point.split(",")[1]) for point in drawn.points.split()]
    assert len(heights) <= 130
    assert min(heights) < drawn.price


def test_the_price_is_reached_where_the_line_says_so():
    one = fake.slice_("a", history=(), cells=(fake.cell(log_evidence=fake.PRICE),))
    drawn = spark(one, one.cells[0], span(fake.status(slices=(one,))))
    assert drawn is not None and drawn.last is not None
    assert drawn.last[1] == drawn.price


def test_a_bar_adds_up_to_the_whole():
    parts = served_parts({"stable": 1, "infer": 2, "refused": 1, "none": 0})
    assert [(p.pool, p.x, p.width) for p in parts] == [
        ("infer", 0, 50.0),
        ("stable", 50.0, 25.0),
        ("other", 75.0, 25.0),
    ]
    assert served_parts({}) == ()


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("mode", ["observe", "enforce"])
@pytest.mark.parametrize("acts", [True, False])
def test_every_state_has_a_page(status, mode, acts):
    one = fake.slice_("a", status, acts=acts, share=None, served={}, cells=())
    bare = fake.status(slices=(one,), mode=mode, gateways=(), pools={}, began=0.0)
    assert "<h1" in page.page(bare, OPERATOR)


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
    assert f">{text}</span>" in page.fragment(fake.status(transitions=(one,), moves=3), VIEWER)
