# A cell that refutes: evidence of how tokens are drawn, of hand-made requests.

from dataclasses import replace

import pytest

from servanda.gateway.routing.evidence_price import slowest
from servanda.gateway.routing.state import Score
from servanda.gateway.routing.state_machine import absorb, advance, begin
from servanda.theory.stats.likelihood_ratio import RequestDraws, names
from tests.gateway.routing.made import cell, facts, looked, one, rules

COLD, WIDE = 1, 3  # two ways of drawing tokens
DRAWS = ("sampler_fidelity", "code")


@pytest.fixture
def rule():
    return rules(cell(), cell(clause="sampler_fidelity", refutes=True))


def draws(way, towards):
    """A request that speaks for one way of drawing tokens (> 0), or against it; nats."""
    above = [-abs(towards)] * len(names())
    below = [0.0] * len(names())
    above[way], below[way] = towards, -towards
    return RequestDraws(4, 0, 0.1, tuple(above), tuple(below))


def fed(rule, state, statistic, n=12, *, tv=0.0):
    for i in range(n):
        found = {("tv", "code"): one(tv)} | ({DRAWS: statistic} if statistic else {})
        state = absorb(rule, state, Score(0.0, f"user {i % 6}", 1.0, found))
    return state


def away(rule, way=COLD):
    state = looked(rule, fed(rule, begin(rule, now=0.0), draws(way, 1.0)), 1.0)
    assert state.slices["code"].status == "quarantined"
    return state


def probation(rule, state):
    return looked(rule, state, state.clock + state.slices["code"].dwell_s)


def test_a_slice_that_left_for_its_sampler_remembers_which_one(rule):
    state, changes = advance(rule, fed(rule, begin(rule, now=0.0), draws(COLD, 1.0)), facts(1.0))
    assert changes[0].reason.startswith(
        f"sampler_fidelity on code fails: tokens are not sampled as infer reports, but closer to "
        f"{names()[COLD]}"
    )
    assert state.slices["code"].doubts == {"sampler_fidelity": COLD}


def test_it_comes_back_on_evidence_against_that_sampler_and_no_other(rule):
    state = probation(rule, away(rule))
    other = fed(rule, state, draws(WIDE, -2.0))
    assert slowest(rule, other.slices["code"]).cell.refutes
    assert looked(rule, other, state.clock).slices["code"].status == "probation"

    against = fed(rule, state, draws(COLD, -2.0))
    assert looked(rule, against, state.clock).slices["code"].status == "recovering"


def test_a_relapse_for_another_clause_keeps_the_doubt_and_needs_no_draws(rule):
    """Requests without likeliest tokens say nothing of the draw, and may break a limit."""
    state = probation(rule, away(rule))
    state = looked(rule, fed(rule, state, None, tv=1.0), state.clock)
    assert state.slices["code"].status == "quarantined" and state.slices["code"].relapses == 1
    assert state.slices["code"].doubts == {"sampler_fidelity": COLD}

    state = probation(rule, state)
    kept = looked(rule, fed(rule, state, None, 30), state.clock)
    assert kept.slices["code"].status == "probation"


def test_a_slice_that_left_for_a_limit_owes_nothing_about_its_sampler(rule):
    state = looked(rule, fed(rule, begin(rule, now=0.0), draws(COLD, 0.0), tv=1.0), 1.0)
    assert state.slices["code"].doubts == {}
    state = probation(rule, state)
    state = looked(rule, fed(rule, state, draws(COLD, 0.0)), state.clock)
    assert state.slices["code"].status == "recovering"


def test_the_evidence_of_a_fair_game_is_no_suspicion(rule):
    """Half a price is what a sound sampler may well show for a while; a limit may not."""
    state = begin(rule, now=0.0)
    some = fed(rule, state, draws(COLD, 0.25))
    track = some.slices["code"].tracks["sampler_fidelity"]
    assert max(track.above) > 0
    assert looked(rule, some, 1.0).slices["code"].status == "active"
    limit = rules(cell())
    at_limit = replace(state, slices=dict(state.slices))
    for i in range(3):
        at_limit = absorb(limit, at_limit, Score(0.0, f"u{i}", 1.0, {("tv", "code"): one(1.0)}))
    assert looked(limit, at_limit, 1.0).slices["code"].status == "suspect"
