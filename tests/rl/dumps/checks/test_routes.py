# Recorded experts against their tokens: a router of which the first layer sees the fed token.

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from servanda.rl.dumps.checks.routes import OTHERS, RoutesCheck
from servanda.rl.steps.blocks import blocks, joined, taken
from servanda.traces.rollouts import ROUTE, UNROUTED
from tests.rl.dumps.checks.made import rollouts

SEQUENCES, TOKENS, WORDS, EXPERTS, PICKED, LAYERS = 60, 60, 12, 16, 4, 2


def routed(lag=0, follows=0.7, **more):
    """Row t holds the experts of token t + lag, whose favourites follow the token in a share."""
    chunk = rollouts(**{"tokens": TOKENS, "sequences": SEQUENCES, **more})
    rng = np.random.default_rng(3)
    token_N = rng.integers(0, WORDS, len(chunk.token_N))
    favourite_VE = rng.normal(size=(WORDS, EXPERTS))
    noise_NLE = rng.normal(size=(len(token_N), LAYERS, EXPERTS))
    score_NLE = follows * favourite_VE[token_N][:, None] + (1 - follows) * noise_NLE
    route_NLK = np.argsort(-score_NLE)[..., :PICKED].astype(np.int32)
    route_NLK = np.roll(route_NLK, 1 - lag, axis=0)  # of the token that is fed before
    route_NLK[chunk.start_S] = UNROUTED
    return with_routes(chunk, route_NLK, token_N=token_N)


def with_routes(chunk, route_NLK, **more):
    return replace(chunk, per_token={ROUTE: route_NLK}, **more)


def finding(*chunks):
    check = RoutesCheck()
    for chunk in chunks:
        check.add(chunk)
    return check.finding()


def test_routes_of_the_tokens_themselves_are_sound():
    found = finding(routed())
    assert found.state == "ok"
    assert found.text.startswith("recorded experts fit their tokens (tokens that recur at")


@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_shifted_rows_are_unsound_and_their_token_is_named(lag):
    found = finding(routed(lag))
    assert found.state == "unsound"
    assert f"row t is that of token t{lag:+d}" in found.text


def test_routes_of_other_sequences_fit_at_no_lag():
    chunk, other = routed(), routed(follows=0.0)
    found = finding(with_routes(chunk, other.per_token[ROUTE]))
    assert found.state == "unsound"
    assert "60 sequences, tokens that recur share at most" in found.text
    few = finding(with_routes(taken(chunk, 0, 40), taken(other, 0, 40).per_token[ROUTE]))
    assert few.state == "warning"
    assert few.text.startswith("nothing shows that the recorded experts are of these tokens")


def test_rows_that_no_router_picks_are_named_with_their_place():
    chunk = routed()
    route_NLK = chunk.per_token[ROUTE].copy()
    route_NLK[-TOKENS:] = 0
    found = finding(with_routes(chunk, route_NLK))
    assert found.state == "unsound"
    assert "have one expert twice, which no router picks" in found.text
    assert found.first == chunk.source_S[-1]
    assert found.odd[:2] == (TOKENS, SEQUENCES * (TOKENS - 1) + 1)


def test_one_set_of_experts_for_all_tokens_was_not_recorded():
    chunk = routed()
    same = np.broadcast_to(np.arange(PICKED, dtype=np.int32), chunk.per_token[ROUTE].shape)
    found = finding(with_routes(chunk, same))
    assert (found.state, found.text.partition(":")[0]) == (
        "unsound",
        "all tokens have the same recorded experts",
    )


def test_sequences_without_routes_among_others_are_counted():
    chunk = routed()
    bare = replace(chunk, per_token={})
    part = joined([taken(chunk, 0, 55), taken(bare, 55, SEQUENCES)])
    assert (part.per_token[ROUTE][-1] == UNROUTED).all()
    for chunks in ([part], [taken(chunk, 0, 55), taken(bare, 55, SEQUENCES)]):
        found = finding(*chunks)
        assert found.state == "warning"
        assert found.text.startswith("5 of 60 sequences have no recorded experts")
        assert found.first == chunk.source_S[55]


def test_a_dump_without_routes_is_not_spoken_of_and_few_pairs_decide_nothing():
    assert finding(rollouts()).text == ""
    found = finding(taken(routed(), 0, 1))
    assert found.state == "warning"
    assert "no more of them than their neighbours do in most of 1 sequences" in found.text


def test_few_pairs_of_tokens_that_decide_nothing_are_no_shift():
    """Experts that follow no token: a shift is found in no run, at the least number of pairs."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        chunk = rollouts(sequences=5, tokens=TOKENS, seed=seed)
        token_N = rng.integers(0, WORDS, len(chunk.token_N))
        route_NLK = rng.integers(0, 8, (len(token_N), 1, 1))
        assert finding(with_routes(chunk, route_NLK, token_N=token_N)).state == "warning"


def test_token_ids_may_be_any_number():
    chunk = routed()
    large = replace(chunk, token_N=chunk.token_N << 55)
    assert finding(large) == finding(chunk)


def test_layers_without_a_router_are_written_as_0_and_skipped():
    chunk = routed()
    route_NLK = chunk.per_token[ROUTE].copy()
    dense_NLK = np.where(route_NLK[:, :1] == UNROUTED, UNROUTED, 0)
    both = with_routes(chunk, np.concatenate([dense_NLK, route_NLK], axis=1))
    assert finding(both) == finding(chunk)


def test_a_token_that_always_follows_another_does_not_make_a_shift():
    """Equal at lag -1 means equal at lag 0 there, and two tokens of context tell more than one."""
    chunk = routed()
    rng = np.random.default_rng(5)
    token_N = rng.integers(0, WORDS, len(chunk.token_N))
    token_N[1::2] = WORDS + token_N[::2] // 2  # two tokens lead to the same
    favourite_VE = rng.normal(size=(2 * WORDS, EXPERTS))
    before_N = np.roll(token_N, 1)
    score_NE = favourite_VE[token_N] + 0.9 * favourite_VE[before_N]
    score_NE += 0.3 * rng.normal(size=score_NE.shape)
    route_NLK = np.roll(np.argsort(-score_NE)[:, None, :PICKED], 1, axis=0).astype(np.int32)
    route_NLK[chunk.start_S] = UNROUTED
    assert finding(with_routes(chunk, route_NLK, token_N=token_N)).state == "ok"


def test_sums_are_those_of_pairs_taken_one_by_one_whatever_the_chunks():
    chunk = routed(sequences=2, group_S=("a", "b"))
    route_NK, found = chunk.per_token[ROUTE][:, 0], []
    for lag in OTHERS:
        counts = np.zeros((3, 2))
        for start in chunk.start_S:
            span = range(start + 1, start + TOKENS)
            for t, u in permutations(span, 2):
                common = len({*route_NK[t].tolist()} & {*route_NK[u].tolist()}) / PICKED
                counts[2] += 1, common
                if not all(start <= i - 1 + lag < start + TOKENS for i in (t, u)):
                    continue
                token_N = chunk.token_N
                here = token_N[t - 1] == token_N[u - 1]
                there = token_N[t - 1 + lag] == token_N[u - 1 + lag]
                if here != there:
                    counts[int(here)] += 1, common
        found.append(counts)
    whole, parts = RoutesCheck(), RoutesCheck()
    whole.add(chunk)
    for piece in blocks([chunk], tokens=TOKENS):
        parts.add(piece)
    for check in (whole, parts):
        total = check.sums.total(np.zeros((len(OTHERS), 3, 2)))
        np.testing.assert_allclose(total, found, rtol=1e-12)


@pytest.mark.parametrize(
    ("larger", "state"),
    # 4 x 2^-16 < 1e-4 < 4 x 2^-15, and 2^-14 < 1e-4 < 2^-13
    [(15, "ok"), (16, "unsound"), (-14, "ok"), (-13, "warning")],
)
def test_any_lag_shifts_at_a_share_of_the_error_and_every_lag_has_to_fit(larger, state):
    """Sequences in which a lag shares more experts than lag 0; of the other lags 30 share fewer."""
    check = RoutesCheck()
    check.add(routed())
    check.shifted = np.array([[0, 30], [max(larger, 0), max(-larger, 0)], [0, 30], [0, 30]])
    if state == "ok" and larger > 0:
        check.shifted[1] = larger, 0
        assert check.finding().state == "warning"  # neither shifted nor of these tokens
    else:
        assert check.finding().state == state


def test_a_record_that_is_shifted_in_a_few_sequences_is_named_with_its_lag():
    chunk = routed()
    route_NLK = chunk.per_token[ROUTE].copy()
    for s in (7, 30, 44):  # rows are written one late
        own = slice(s * TOKENS + 2, (s + 1) * TOKENS)
        route_NLK[own] = chunk.per_token[ROUTE][s * TOKENS + 1 : (s + 1) * TOKENS - 1]
    found = finding(with_routes(chunk, route_NLK))
    assert (found.state, found.odd[:2]) == ("unsound", (3, SEQUENCES))
    assert "row t is that of token t-1" in found.text
    assert found.first == chunk.source_S[7]


@pytest.mark.parametrize("written", ["of the next sequence", "repeated", "by chance"])
def test_a_record_that_is_not_of_its_tokens_in_a_few_sequences_is_named(written):
    chunk = routed()
    route_NLK, own_NLK = chunk.per_token[ROUTE].copy(), chunk.per_token[ROUTE]
    for s in (7, 30, 44):
        at = slice(s * TOKENS + 1, (s + 1) * TOKENS)
        if written == "of the next sequence":
            route_NLK[at] = own_NLK[at.stop + 1 : at.stop + TOKENS]
        elif written == "repeated":
            route_NLK[at] = own_NLK[at.start]
        else:
            rng = np.random.default_rng(s)
            drawn = rng.permuted(np.tile(np.arange(EXPERTS), (TOKENS - 1, LAYERS, 1)), axis=-1)
            route_NLK[at] = drawn[..., :PICKED]
    found = finding(with_routes(chunk, route_NLK))
    assert (found.state, found.odd[:2]) == ("unsound", (3, SEQUENCES))
    assert found.text.startswith("the recorded experts are not those of the tokens in 3 of 60")


@pytest.mark.parametrize("follows", [0.3, 0.5, 0.9])
def test_a_record_of_its_tokens_is_odd_in_no_sequence(follows):
    for seed in range(10):
        chunk = routed(follows=follows, seed=seed)
        check = RoutesCheck()
        check.add(chunk)
        assert (check.moved.affected, check.strange.affected) == (0, 0)
