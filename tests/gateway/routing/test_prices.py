# What the prices buy: how often a sound slice is taken away, and how soon a broken one is seen.

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.routing.evidence_price import (
    SUSPICIOUS,
    add_request,
    evidence_above,
    evidence_of,
    evidence_within,
    log_prices,
    slowest,
)
from servanda.gateway.routing.state import Track
from servanda.gateway.routing.state_machine import begin
from servanda.theory.stats.bets import POS
from servanda.theory.stats.group_ratio import GroupRatio
from tests import oracles
from tests.gateway.routing import oracle
from tests.gateway.routing.made import LIMIT, cell, one, rules

VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def track(xs, limit=LIMIT):
    found = Track()
    for x in xs:
        found = add_request(found, one(x), limit, 1.0)
    return found


@given(VALUES)
def test_the_processes_are_those_of_the_definition(xs):
    rule = rules()
    found = track(xs)

    left = evidence_above(rule, cell(), found)
    back = evidence_within(rule, cell(), found)

    assert back.log_evidence == pytest.approx(oracle.below(xs, LIMIT), abs=1e-9)
    if left.process == "since":
        assert left.log_evidence == pytest.approx(oracle.above(xs, LIMIT), abs=1e-9)
    else:
        assert left.log_evidence == pytest.approx(oracle.alarm(xs, LIMIT), abs=1e-9)


def test_leaving_is_priced_for_all_cells_together_and_the_return_is_not():
    """One false alarm of any cell diverts its slice; for a return every cell has to show it."""
    xs, few = [0.9] * 30 + [0.2] * 5, cell("code")
    for names in (("code",), ("code", "chat", "maths", "all")):
        cells, found = [cell(name) for name in names], track(xs)
        since, alarm = oracle.above(xs, LIMIT), oracle.alarm(xs, LIMIT)
        for near, paid in ((1e-6, False), (-1e-6, True)):
            plain = rules(*cells, enter_evidence=math.exp(since + near) / len(names), horizon=10**9)
            late = math.exp(alarm + near) / len(names) / 40
            after = rules(*cells, enter_evidence=late, horizon=40)
            blind = replace(found, above=(-50.0,) * len(POS))  # a good past
            assert evidence_above(plain, few, found).paid == paid
            assert evidence_above(after, few, blind).paid == paid
            assert evidence_above(after, few, blind).log_price == pytest.approx(
                math.log(late * len(names) * 40)
            )
        good, below = track([0.1] * 30), oracle.below([0.1] * 30, LIMIT)
        for near, paid in ((1e-6, False), (-1e-6, True)):
            back = rules(*cells, leave_evidence=math.exp(below + near))
            assert evidence_within(back, few, good).paid == paid
        prices = log_prices(rules(*cells, enter_evidence=50, leave_evidence=9, horizon=7))
        by_hand = [math.log(n) for n in (50 * len(names), 50 * len(names) * 7, 9)]
        assert prices == pytest.approx(by_hand)


def test_a_token_that_is_missing_moves_both_bets_away():
    lost = GroupRatio(4, 1, np.array([2.0]), np.array([2]), np.array([2]))
    known = GroupRatio(4, 1, np.array([2.0]), np.array([2]), np.array([0]))

    missing, there = (add_request(Track(), g, LIMIT, 1.0) for g in (lost, known))

    assert all(a < b for a, b in zip(missing.above, there.above, strict=True))
    assert all(a < b for a, b in zip(missing.below, there.below, strict=True))


def test_without_a_request_nothing_is_near():
    rule = rules()
    state = begin(rule, now=0.0).slices["code"]

    assert [w.near for w in evidence_of(rule, state)] == [0.0]
    assert (slowest(rule, state).near, slowest(rule, state).paid) == (0.0, False)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["shares", "skewed"])
def test_a_sound_slice_is_seldom_taken_away(spread):
    """At its limit exactly, which is the worst: once for each price at most, both together."""
    rule = rules(cell(limit=0.2), enter_evidence=10, horizon=200)
    rng = np.random.default_rng(5)
    left = 0
    for _ in range(80):
        xs = rng.random(200) < 0.2 if spread == "shares" else rng.beta(0.4, 1.6, 200)
        left += first_paid(rule, xs.astype(float), 0.2) is not None

    assert 0 < left / 80 <= 2 / 10


def first_paid(rule, xs, limit, found=None):
    """How many requests it took; None: it is not paid."""
    found = found or Track()
    for n, x in enumerate(xs.tolist(), start=1):
        found = add_request(found, one(x), limit, 1.0)
        if evidence_above(rule, cell(limit=limit), found).paid:
            return n
    return None


def good_past(n, x, limit):
    """The track after n requests of the same small value, without going through each."""
    factor = np.log1p(POS * x) - np.log1p(POS * limit)
    # log S of a constant factor: a geometric sum
    with np.errstate(divide="ignore", over="ignore"):
        steps = np.arange(1, n + 1)[:, None] * factor[None, :]
    top = steps.max(axis=0)
    log_s = top + np.log(np.exp(steps - top).sum(axis=0))
    below = tuple([0.0] * 16)
    return Track(n=n, above=tuple((n * factor).tolist()), below=below, alarm=tuple(log_s.tolist()))


def test_a_good_past_cannot_hide_a_new_fault():
    """After 100,000 good requests the plain process would need many thousand bad ones."""
    rule = rules(cell(limit=0.05), enter_evidence=1000, horizon=10_000)
    past = good_past(100_000, 0.02, 0.05)
    rng = np.random.default_rng(7)
    bad = rng.beta(0.6, 3.4, 400)  # mean .15, three times the limit

    assert evidence_above(rule, cell(limit=0.05), past).near < SUSPICIOUS
    seen = first_paid(rule, bad, 0.05, past)

    blind = replace(past, alarm=(-math.inf,) * len(POS))
    for x in bad.tolist():
        blind = replace(add_request(blind, one(x), 0.05, 1.0), alarm=blind.alarm)
    assert seen is not None
    assert seen < 200
    assert oracles.mixed(list(blind.above)) < math.log(1000)


def test_a_mean_at_its_limit_raises_no_lasting_suspicion():
    """The sum over beginnings grows by itself, like their number: that is no evidence."""
    rule = rules(cell(limit=0.2), enter_evidence=1000, horizon=10_000)
    rng = np.random.default_rng(11)
    found = Track()
    for x in (rng.random(10_000) < 0.2).tolist():
        found = add_request(found, one(float(x)), 0.2, 1.0)

    assert evidence_above(rule, cell(limit=0.2), found).near < SUSPICIOUS
