# Fidelity: uniform under its hypothesis, and quick to see a sampler that lies.

import math

import numpy as np
import pytest

from servanda.theory.sampling import Sampling, draw, processed_logprobs, standing
from servanda.theory.stats.pit import Fidelity, log_densities


@pytest.mark.slow
def test_every_alternative_is_a_density():
    middles = (np.arange(2_000_000) + 0.5) / 2_000_000
    assert np.exp(log_densities(middles)).mean(axis=1) == pytest.approx(1.0, abs=1e-3)


def pit(rng, n, declared, real, vocabulary=50):
    """PIT values of n tokens drawn with `real` while `declared` is reported."""
    logits = rng.normal(size=(n, vocabulary)) * 1.5
    tokens = draw(processed_logprobs(logits, real), rng.random(n))
    logp = processed_logprobs(logits, declared)
    own = np.exp(logp[np.arange(n), tokens])
    return standing(logp, tokens)[1] + rng.random(n) * own


@pytest.mark.slow
def test_an_honest_sampler_is_rejected_no_more_often_than_alpha():
    rng = np.random.default_rng(3)
    runs, alpha = 400, 0.05
    honest = Sampling(temperature=0.8, top_p=0.9)
    wrong = 0
    for _ in range(runs):
        growth = log_densities(pit(rng, 400, honest, honest)).cumsum(axis=1)
        wrong += np.log(np.exp(growth).mean(axis=0)).max() >= math.log(1 / alpha)
    assert wrong / runs <= alpha + 2.33 * math.sqrt(alpha * (1 - alpha) / runs)


@pytest.mark.parametrize(
    ("real", "tokens"),
    [
        (Sampling(top_p=0.9), 300),
        (Sampling(top_p=0.98), 3000),
        (Sampling(temperature=0.8), 600),
        (Sampling(temperature=1.2), 1500),
        (Sampling(top_k=20), 600),
    ],
)
def test_an_undisclosed_transform_is_seen(real, tokens):
    u = pit(np.random.default_rng(4), tokens, Sampling(), real)
    assert Fidelity.of(u).log_e >= math.log(1000)


def test_rounds_add_up():
    u = np.random.default_rng(5).random(100)
    whole, parts = Fidelity.of(u), Fidelity.of(u[:40]) + Fidelity.of(u[40:])
    assert parts.log_e == pytest.approx(whole.log_e)
    assert parts.n == 100
