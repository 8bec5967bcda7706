# Turns by weight, and the replicas of sessions.

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.proxy.pools.server_pool import WeightedTurns, by_session

ROUNDING = 1e-6
NAMES = "abcdefgh"
weights_ = st.one_of(st.integers(1, 9).map(float), st.floats(0.01, 100.0))
pools = st.dictionaries(st.sampled_from(NAMES), weights_, min_size=1)
# which replicas may be chosen, and for how many requests
phases = st.lists(
    st.tuples(st.sets(st.sampled_from(NAMES), min_size=1), st.integers(1, 30)), max_size=8
)


def shares(weights):
    total = sum(map(Fraction, weights.values()))
    return {name: Fraction(weight) / total for name, weight in weights.items()}


@given(pools, st.integers(1, 200))
def test_after_every_request_each_replica_has_had_its_share_to_within_one(weights, n):
    turns, counted, due = WeightedTurns(), Counter(), shares(weights)
    for t in range(1, n + 1):
        counted[turns.take(weights)] += 1
        assert all(abs(counted[name] - t * due[name]) < 1 for name in weights)


@given(pools, st.integers(0, 60), st.integers(1, 60))
def test_over_any_window_each_replica_has_its_share_to_within_two(weights, before, n):
    turns, due = WeightedTurns(), shares(weights)
    for _ in range(before):
        turns.take(weights)
    counted = Counter(turns.take(weights) for _ in range(n))
    assert all(abs(counted[name] - n * due[name]) < 2 for name in weights)


@given(pools, phases)
def test_only_a_replica_that_may_be_chosen_is(weights, several):
    turns = WeightedTurns()
    for names, n in several:
        allowed = {name: weight for name, weight in weights.items() if name in names}
        if allowed:
            assert {turns.take(allowed) for _ in range(n)} <= allowed.keys()


@given(pools, phases, st.integers(1, 100))
def test_a_replica_that_was_away_makes_up_for_nothing(weights, several, n):
    """Its share counts from its return: no burst of requests finds its caches empty."""
    turns = WeightedTurns()
    for names, m in several:
        allowed = {name: weight for name, weight in weights.items() if name in names}
        for _ in range(m if allowed else 0):
            turns.take(allowed)
    counted, due = Counter(), shares(weights)
    for t in range(1, n + 1):
        counted[turns.take(weights)] += 1
        assert all(abs(counted[name] - t * due[name]) < 2 for name in weights)


def test_weights_of_three_to_one_alternate():
    turns = WeightedTurns()
    assert "".join(turns.take({"a": 3.0, "b": 1.0}) for _ in range(12)) == "aabaaabaaaba"


@given(pools, st.text())
def test_a_session_has_one_order_of_replicas_whatever_their_order(weights, session):
    turned = dict(reversed(weights.items()))
    assert by_session(session, weights) == by_session(session, turned)
    assert sorted(by_session(session, weights)) == sorted(weights)


@given(pools, st.text(), st.sampled_from(NAMES))
def test_a_replica_that_leaves_moves_only_its_own_sessions(weights, session, gone):
    left = {name: weight for name, weight in weights.items() if name != gone}
    order = by_session(session, weights)
    assert by_session(session, left) == [name for name in order if name != gone]


@given(pools, st.text(), st.sampled_from(NAMES), st.floats(1.0, 10.0))
def test_a_replica_with_more_weight_only_gains_sessions(weights, session, name, times):
    more = {**weights, **({name: times * weights[name]} if name in weights else {})}
    before, after = by_session(session, weights)[0], by_session(session, more)[0]
    assert after in (before, name)


@pytest.mark.parametrize("weights", [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 2.0}])
def test_sessions_are_shared_by_weight(weights):
    n = 8000
    counted = Counter(by_session(f"session {i}", weights)[0] for i in range(n))
    for name, share in shares(weights).items():
        sigma = float(n * share * (1 - share)) ** 0.5
        assert abs(counted[name] - n * share) < 4 * sigma
