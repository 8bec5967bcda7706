# Sampling: filters against their definitions; draws that do not depend on batching.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.theory.sampling import (
    Sampling,
    draw,
    entropy_nats,
    observe,
    processed_logprobs,
    standing,
    uniforms,
)
from tests import oracles

# on a grid, so that a definition in other floating point ties where ours does
logits = st.lists(st.integers(-800, 800).map(lambda i: i / 100), min_size=2, max_size=8)


@given(logits, st.floats(0.1, 3), st.floats(0.05, 1))
def test_temperature_then_top_p_is_the_definition(z, temperature, top_p):
    p = oracles.softmax([x / temperature for x in z])
    kept = oracles.nucleus(p, top_p)
    total = math.fsum(p[t] for t in kept)
    ours = np.exp(processed_logprobs(np.array([z]), Sampling(temperature=temperature, top_p=top_p)))
    expected = [p[t] / total if t in kept else 0.0 for t in range(len(z))]
    if top_p == 1.0:
        expected = p
    assert ours[0] == pytest.approx(expected, abs=1e-9)


@given(logits, st.integers(1, 8), st.floats(0, 0.9))
def test_top_k_then_min_p_is_the_definition(z, k, min_p):
    p = oracles.softmax(z)
    best = sorted(range(len(z)), key=lambda t: (-z[t], t))[:k]
    kept = {t for t in best if p[t] >= min_p * max(p) * (1 - 1e-12)}
    ours = processed_logprobs(np.array([z]), Sampling(top_k=k, min_p=min_p))[0]
    assert {int(t) for t in np.flatnonzero(np.isfinite(ours))} == kept
    assert np.exp(ours).sum() == pytest.approx(1)


@given(logits, st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_distribution_function(z, u):
    logp = processed_logprobs(np.array([z]), Sampling(top_p=0.9))
    token = int(draw(logp, np.array([u]))[0])
    p = np.exp(logp[0])
    assert p[token] > 0
    assert p[:token].sum() <= u + 1e-9 and u <= p[: token + 1].sum() + 1e-9


def test_the_last_uniform_before_one_draws_a_token_that_has_mass():
    logp = np.log(
        np.array([[0.3, 0.7, 0.0]]), where=[[True, True, False]], out=np.full((1, 3), -np.inf)
    )
    assert draw(logp, np.array([1.0]))[0] == 1  # what a product that rounds up asks for


@given(logits)
def test_masses_before_rank_every_token_once(z):
    logp = processed_logprobs(np.array([z]), Sampling())
    p = np.exp(logp[0])
    before = [float(standing(logp, np.array([t]))[1][0]) for t in range(len(z))]
    order = sorted(range(len(z)), key=lambda t: before[t])
    assert np.cumsum(p[order]) - p[order] == pytest.approx([before[t] for t in order], abs=1e-12)


def test_a_row_is_observed_as_its_definition():
    logits_RV = np.log(np.array([[0.5, 0.3, 0.2]]))
    columns = observe(logits_RV, np.array([1]), Sampling())
    assert np.exp(columns["logp"]) == pytest.approx([0.3])
    assert columns["top1"] == [0.0] and columns["p_max"] == pytest.approx([0.5])
    assert columns["mass_before"] == pytest.approx([0.5])
    assert columns["entropy_nats"] == pytest.approx(
        [-sum(p * math.log(p) for p in (0.5, 0.3, 0.2))]
    )
    assert entropy_nats(np.array([[0.0, -np.inf]]))[0] == 0.0


def test_uniforms_are_keyed_by_seed_stream_and_sequence_and_indexed_by_position():
    base = uniforms(1, "draw", 5, 8)
    assert (uniforms(1, "draw", 5, 4) == base[:4]).all()
    for other in (uniforms(2, "draw", 5, 8), uniforms(1, "pit", 5, 8), uniforms(1, "draw", 6, 8)):
        assert not (other == base).any()
    many = np.concatenate([uniforms(0, "draw", s, 16) for s in range(2000)])
    assert many.mean() == pytest.approx(0.5, abs=0.01) and many.min() >= 0 and many.max() < 1
