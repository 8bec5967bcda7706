# Where one request goes: by a keyed hash, the smallest share of its slices, and people first.

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.routing.model import RequestFacts, SliceRoute, Snapshot
from servanda.gateway.routing.router import Router, place
from servanda.judgement.slices.rules import OPERATORS, Cut, Term
from tests.gateway.routing.made import cut

SHARES = st.floats(0, 1)
WORDS = st.text(max_size=8)


def snapshot(*slices, **changes):
    made = Snapshot(
        version=3,
        contract="d",
        name="small",
        valid_until=1000.0,
        salt="0a0b",
        slices=(*slices, SliceRoute(Cut("all"))),
        labels={"team": "request.metadata.team"},
    )
    return replace(made, **changes)


def decide(made, who="a", *, team="code", request=None, now=0.0, **known):
    given = RequestFacts(request or who, who, {"team": team} if team else {}, **known)
    return Router(made).decide(given, now=now)


def route(name="code", **changes):
    return SliceRoute(cut(name), **{"acts": True, **changes})


AWAY = route(status="quarantined", share=0.0, mirror=1.0, sample=1.0)


@pytest.mark.slow
@given(WORDS, SHARES, SHARES)
def test_whoever_is_on_infer_stays_there_when_its_share_grows(who, one, other):
    low, high = sorted((one, other))

    before, after = (decide(snapshot(route(share=s)), who).pool for s in (low, high))

    assert (before, after) != ("infer", "stable")


@given(WORDS, SHARES, WORDS, WORDS)
def test_a_session_goes_where_it_went(who, share, first, second):
    made = snapshot(route(share=share))

    assert decide(made, who, request=first).pool == decide(made, who, request=second).pool


def test_what_a_promotion_wants_a_row_of_is_no_evidence_of_slices_that_did_not_ask():
    made = snapshot(route(sample=0.1), sample=0.5)
    found = [decide(made, f"user {i}") for i in range(20_000)]
    assert {one.chance for one in found} == {0.5}
    rows = [one for one in found if one.sampled]
    assert len(rows) / 20_000 == pytest.approx(0.5, abs=0.02)
    of_code = [one for one in rows if "code" in one.drawn]
    assert len(of_code) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert {one.drawn["code"] for one in of_code} == {0.1}


def test_what_stable_serves_is_no_row_of_a_promotion_unless_it_is_mirrored():
    made = snapshot(base=0.0, mirror=0.3, sample=1.0)
    found = [decide(made, f"user {i}") for i in range(2000)]
    assert {one.pool for one in found} == {"stable"}
    assert all(one.sampled == one.mirrored for one in found)
    assert 0.25 < sum(one.mirrored for one in found) / 2000 < 0.35


def test_where_a_run_gives_all_back_no_session_stays_on_infer():
    before = decide(snapshot(base=0.1), session="infer")
    back = decide(snapshot(base=0.0), session="infer")
    assert (before.pool, before.reason) == ("infer", "session")
    assert (back.pool, back.reason) == ("stable", "split")


def test_a_share_is_what_it_says():
    made = snapshot(route(share=0.3))

    pools = [decide(made, f"user {i}").pool for i in range(20_000)]

    assert pools.count("infer") / 20_000 == pytest.approx(0.3, abs=0.01)


def test_nobody_foresees_where_he_lands_without_the_salt():
    first, second = (snapshot(route(share=0.5), salt=salt) for salt in ("0a", "0b"))

    same = sum(decide(first, f"{i}").pool == decide(second, f"{i}").pool for i in range(10_000))

    assert same == pytest.approx(5000, abs=200)


def test_a_place_is_fixed_for_ever():
    """Another hash would move every session of every deployment."""
    assert place(b"key", "share", "session 7") == pytest.approx(0.8656317000002263, abs=1e-15)


@given(SHARES, SHARES, WORDS)
def test_of_the_slices_of_a_request_the_smallest_share_is_followed(one, other, who):
    both = replace(route(share=other), cut=Cut("wide"))

    chosen = decide(snapshot(route(share=one), both), who)

    assert chosen.slices == ("code", "wide", "all")
    assert chosen.pool == decide(snapshot(route(share=min(one, other))), who).pool


def test_a_slice_that_only_observes_is_said_and_not_followed():
    chosen = decide(snapshot(replace(AWAY, acts=False)))

    assert (chosen.pool, chosen.would, chosen.mirrored) == ("infer", "stable", False)


def test_the_whole_that_is_away_takes_every_slice_along():
    whole = SliceRoute(Cut("all"), share=0.0, status="quarantined", acts=True, mirror=0.5)

    chosen = decide(replace(snapshot(), slices=(route(), whole)))

    assert (chosen.pool, chosen.reason) == ("stable", "all quarantined")


@pytest.mark.parametrize(
    ("pins", "pool"),
    [(("infer", "stable"), "stable"), (("infer", ""), "infer"), (("", ""), "stable")],
)
def test_people_come_first_and_stable_before_infer(pins, pool):
    wide = replace(AWAY, cut=Cut("wide"), pinned=pins[1])

    assert decide(snapshot(replace(AWAY, pinned=pins[0]), wide)).pool == pool


def test_a_pin_is_followed_where_a_slice_only_observes():
    chosen = decide(snapshot(route(pinned="stable", acts=False)))

    assert (chosen.pool, chosen.reason) == ("stable", "code pinned")


@pytest.mark.parametrize(("critical", "pool"), [(False, "infer"), (True, "stable")])
def test_a_session_keeps_its_kernel_short_of_critical(critical, pool):
    chosen = decide(snapshot(replace(AWAY, critical=critical)), session="infer")

    assert chosen.pool == pool


def test_a_snapshot_that_is_over_is_followed_only_where_nothing_acts():
    acting, watching = snapshot(route()), snapshot(route(acts=False))

    over = decide(acting, now=1000.0)
    assert (over.pool, over.reason, over.sampled) == ("stable", "expired", False)
    assert decide(watching, now=1000.0).pool == "infer"


def test_without_a_snapshot_somebody_serves_all_the_same():
    for who in ("stable", "infer"):
        chosen = Router(None, who).decide(RequestFacts("r", "s"), now=0.0)
        assert (chosen.pool, chosen.reason, chosen.version) == (who, "no snapshot", 0)


@pytest.mark.parametrize(
    ("outside", "pool"), [("stable", "stable"), ("infer", "infer"), ("refuse", None)]
)
def test_what_lies_outside_the_envelope_is_served_as_the_contract_says(outside, pool):
    made = snapshot(route(), prompt_tokens=(1, 100), outside=outside)

    assert decide(made, prompt_tokens=101).pool == pool
    assert decide(made, prompt_tokens=100).pool == "infer"
    assert decide(made).pool == "infer"  # nobody counted them


def test_a_contract_without_a_stable_kernel_is_served_by_infer():
    made = snapshot(AWAY, has_stable=False, without="infer")

    assert decide(made).pool == "infer"


# of which slices it is a sample


def test_samples_are_nested_and_each_slice_has_its_own_share():
    close = route(sample=0.5)
    made = replace(snapshot(), slices=(close, SliceRoute(Cut("all"), sample=0.1)))

    chosen = [decide(made, f"{i}") for i in range(20_000)]

    assert {tuple(c.drawn) for c in chosen} == {(), ("code",), ("code", "all")}
    for name, share in (("code", 0.5), ("all", 0.1)):
        drawn = [c for c in chosen if name in c.drawn]
        assert len(drawn) / 20_000 == pytest.approx(share, abs=0.01)
        assert {c.drawn[name] for c in drawn} == {share}
    assert all(c.sampled == bool(c.drawn) for c in chosen)
    assert {c.chance for c in chosen} == {0.5}


def test_what_stable_serves_instead_says_nothing_of_what_infer_serves():
    """Mirrored requests of a slice that is away would break the whole, which serves none."""
    whole = SliceRoute(Cut("all"), sample=1.0)

    for acts in (True, False):
        chosen = decide(replace(snapshot(), slices=(replace(AWAY, acts=acts), whole)))
        assert chosen.drawn == {"code": 1.0}
    other = decide(replace(snapshot(), slices=(AWAY, whole)), team="chat")
    assert other.drawn == {"all": 1.0}


def test_a_shadow_is_a_sample_of_every_slice():
    made = snapshot(route(share=0.0, sample=1.0), base=0.0, mirror=1.0)

    chosen = decide(made)

    assert (chosen.pool, chosen.mirrored) == ("stable", True)
    assert "code" in chosen.drawn


def test_what_infer_is_not_asked_is_no_sample():
    chosen = decide(snapshot(replace(AWAY, mirror=0.0)))

    assert (chosen.mirrored, chosen.sampled, chosen.chance, chosen.drawn) == (False, False, 0.0, {})


# slices of one request


NUMBERS = st.one_of(st.integers(-9, 9).map(float), st.floats(-10, 10))
LABELS = st.sampled_from(["a", "b", "", "ab"])


@given(
    st.sampled_from([op for op in OPERATORS if op not in ("in", "exists")]),
    NUMBERS,
    st.none() | NUMBERS,
)
def test_a_term_says_the_same_of_one_number_as_of_a_column_of_it(op, edge, value):
    term = Term("request.prompt_tokens", op, edge)
    column = np.array([np.nan if value is None else value])

    assert term.met_by(value) == bool(term.mask(column)[0])


@given(
    st.sampled_from(
        [("in", ("a", "b")), ("not_in", ("a", "")), ("exists", True), ("exists", False)]
    ),
    st.none() | LABELS,
)
def test_a_term_says_the_same_of_one_label_as_of_a_column_of_it(compared, value):
    term = Term("labels.team", *compared)
    column = np.array([value], dtype=object)

    assert term.met_by(value) == bool(term.mask(column)[0])


@given(st.lists(st.tuples(LABELS, st.integers(0, 50)), min_size=1, max_size=20))
def test_a_request_lies_in_the_slices_whose_columns_it_meets(requests):
    cuts = [
        Cut("long", (Term("request.prompt_tokens", "gte", 20),)),
        Cut("a", (Term("labels.team", "in", ("a",)),)),
        Cut(
            "short a", (Term("labels.team", "in", ("a",)), Term("request.prompt_tokens", "lt", 20))
        ),
        Cut("other", (Term("labels.team", "not_in", ("a", "b")),)),
    ]
    made = replace(snapshot(), slices=tuple(map(SliceRoute, cuts)))
    columns = {
        "labels.team": np.array([label or None for label, _ in requests], dtype=object),
        "request.prompt_tokens": np.array([float(n) for _, n in requests]),
    }
    masks = {one.name: one.mask(columns, len(requests)) for one in cuts}

    for i, (label, tokens) in enumerate(requests):
        chosen = decide(made, team=label, prompt_tokens=tokens)
        assert chosen.slices == tuple(one.name for one in cuts if masks[one.name][i])
