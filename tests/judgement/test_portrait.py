# Portraits: sums that describe a run, against a token-by-token count.

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.judgement.slices.atoms import SliceCodes
from servanda.judgement.token_profile import (
    EDGES,
    FINE,
    JOINT_BINS,
    KEPT,
    LEAST,
    RATIO_EDGES,
    Portrait,
    Sums,
    gates,
    portray,
    quantile_text,
)
from servanda.traces.trace import Trace, TracePair

logprob = st.floats(-12, -1e-6)
sequences = st.lists(
    st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=5), min_size=1, max_size=5
)


def pair_of(tokens_S, first=0):
    """Sequences of (logp_train, logp_infer, same best token)."""
    length_S = np.array([len(tokens) for tokens in tokens_S])
    flat = [token for tokens in tokens_S for token in tokens]
    shape = {
        "sequence_S": np.arange(len(tokens_S)) + first,
        "length_S": length_S,
        "lost_S": np.zeros(len(tokens_S), dtype=bool),
        "prompt_tokens_S": np.arange(len(tokens_S)) * 40 + 3,
        "token_N": np.arange(len(flat)),
    }
    train = {"logp": np.array([t for t, _, _ in flat]), "top1": np.zeros(len(flat))}
    flips = np.array([not same for _, _, same in flat], dtype=float)
    entropy = np.linspace(0, 3, len(flat))
    infer = {"logp": np.array([q for _, q, _ in flat]), "top1": flips, "entropy_nats": entropy}
    return TracePair(Trace(**shape, columns=infer), Trace(**shape, columns=train))


def portrait_of(tokens_S, first=0):
    pair = pair_of(tokens_S, first)
    every = np.ones(len(pair.infer.token_N), dtype=bool)
    return portray(pair, SliceCodes.of({"all": every}, len(every)), range(len(tokens_S)))


@pytest.mark.slow
@given(sequences)
def test_the_sums_are_those_of_every_token(tokens_S):
    portrait = portrait_of(tokens_S)
    flat = [token for tokens in tokens_S for token in tokens]
    ratios = [train - infer for train, infer, _ in flat]
    total = portrait.total
    assert total.n == len(flat) == portrait.slices["all"].n
    assert total.tv == pytest.approx(sum(max(0.0, -math.expm1(r)) for r in ratios))
    assert total.k3 == pytest.approx(sum(math.expm1(r) - r for r in ratios))
    assert total.abs_log_ratio == pytest.approx(sum(map(abs, ratios)))
    assert total.flips == sum(not same for _, _, same in flat)
    assert total.nll_train - total.nll_infer == pytest.approx(total.k1)
    for name, bins in portrait.by.items():
        assert len(bins) == len(EDGES[name]) + 1
        assert sum(b.n for b in bins) == total.n
        assert sum(b.tv for b in bins) == pytest.approx(total.tv)
    assert sum(map(sum, portrait.ratios)) == total.n
    largest = sorted(map(abs, ratios), reverse=True)[:KEPT]
    assert [w.abs_log_ratio for w in portrait.worst] == pytest.approx(largest)


@pytest.mark.slow
@given(sequences, sequences)
def test_portraits_of_rounds_add_up(first, second):
    whole = portrait_of([*first, *second])
    parts = portrait_of(first) + portrait_of(second, first=len(first))
    assert parts.ratios == whole.ratios
    assert dataclasses.astuple(parts.total) == pytest.approx(dataclasses.astuple(whole.total))
    assert [w.sequence for w in parts.worst] == [w.sequence for w in whole.worst]


def test_the_worst_token_is_named_by_its_place():
    portrait = portrait_of([[], [(-1.0, -1.0, True), (-5.0, -1.0, False)], [(-1.0, -1.1, True)]])
    worst = portrait.worst[0]
    assert (worst.sequence, worst.position, worst.token) == (1, 1, 1)
    assert worst.p_train == pytest.approx(math.exp(-5)) and worst.context == (0,)
    assert worst.rank is None  # it was not recorded


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("scale", [0.002, 0.1, 3.0])
def test_a_quantile_lies_between_two_ends_that_are_two_percent_apart(share, scale):
    apart = np.random.default_rng(0).exponential(scale, 400)
    portrait = portrait_of([[(-30.0, -30.0 + x, True)] for x in apart])
    halves = apart[:7], apart[7:]
    parts = [portrait_of([[(-30.0, -30.0 + x, True)] for x in some]) for some in halves]
    low, high = portrait.quantile(share)
    truth = np.quantile(np.abs(-30.0 - (-30.0 + apart)), share, method="inverted_cdf")
    assert low <= truth <= high
    assert high / low <= 1 + FINE + 1e-9 or high <= 1.4 * LEAST
    assert (parts[0] + parts[1]).quantile(share) == (low, high)


def test_a_portrait_that_was_stored_without_fine_counts_gives_wider_ends():
    portrait = replace(portrait_of([[(-1.127, -1.0, True)]]), fine={})
    low, high = portrait.quantile(0.99)
    assert low <= 0.127 <= high and low in RATIO_EDGES and high in RATIO_EDGES
    assert quantile_text((low, high))[1].startswith("≤")
    assert Portrait().quantile(0.99) is None


def test_absent_numbers_are_not_zero():
    assert Sums().mean("tv") is None
    assert all(gate.passes is None for gate in gates({}))
    assert {gate.text for gate in gates({})} == {"not measured"}


def test_the_gates_of_the_field():
    tokens = [[(-1.0, -1.0, True)] * 97 + [(-1.5, -1.0, False)] * 3]
    found = {gate.name.split(" ≤")[0]: gate for gate in gates({"infer": portrait_of(tokens)})}
    d = 0.5
    assert found["mean |Δ logp|"].value == pytest.approx(0.03 * d)
    assert found["mean |Δ logp|"].passes
    assert found["token_mult_prob_error"].value == pytest.approx(0.97 + 0.03 * math.exp(d))
    assert found["mean KL (k3)"].value == pytest.approx(0.03 * (math.expm1(-d) + d))
    assert not found["p99 |Δ logp|"].passes
    assert not found["top-1 agreement ≥ 98 %"].passes
    assert not found["perplexity of the drawn tokens, ±1 %"].passes
    assert "→" in found["perplexity of the drawn tokens, ±1 %"].text


def test_every_token_is_counted_once_by_the_probabilities_of_both_sides():
    portrait = portrait_of([[(-0.1, -0.6, True), (-0.1, -0.7, True), (-2.0, -99.0, True)]])
    assert portrait.joint == {"2,0": 2, f"{JOINT_BINS - 1},8": 1}
    assert (portrait + portrait).joint == {"2,0": 4, f"{JOINT_BINS - 1},8": 2}
