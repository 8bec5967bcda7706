# Fidelity: uniform under its hypothesis, and quick to see a sampler that lies.

import math

import numpy as np
import pytest

from servanda.theory.sampling import Sampling, draw, processed_logprobs, standing
from servanda.theory.stats import likelihood_ratio
from servanda.theory.stats.bets import by_request, log_mean_exp
from servanda.theory.stats.pit import OPPOSITE, Fidelity, log_densities


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


def requests_drawn(seed, colder, hotter, share, requests=300, tokens=24):
    """(u [N], ids [N, 8], their logprobs, drawn [N], request [N]): a share of the requests is
    drawn at one of two temperatures, and all are reported at 1."""
    rng = np.random.default_rng(seed)
    request_N = np.repeat(np.arange(requests), tokens)
    logp_NV = rng.normal(0, 2, (len(request_N), 50))
    logp_NV -= np.logaddexp.reduce(logp_NV, axis=1)[:, None]
    which = rng.random(requests)
    heat_S = np.where(which < share / 2, colder, np.where(which < share, hotter, 1.0))
    law_NV = np.exp(logp_NV / heat_S[request_N][:, None]).cumsum(axis=1)
    token_N = (rng.random(len(law_NV))[:, None] * law_NV[:, -1:] > law_NV).sum(axis=1)
    ids_NV = np.argsort(-logp_NV, axis=1)
    best_NV = np.take_along_axis(logp_NV, ids_NV, axis=1)
    rank_N = (ids_NV == token_N[:, None]).argmax(axis=1)
    mass_NV = np.exp(best_NV)
    own_N = np.take_along_axis(mass_NV, rank_N[:, None], axis=1)[:, 0]
    before_N = np.take_along_axis(mass_NV.cumsum(axis=1), rank_N[:, None], axis=1)[:, 0] - own_N
    u_N = np.minimum(before_N + rng.random(len(own_N)) * own_N, 1)
    return u_N, ids_NV[:, :8], best_NV[:, :8], token_N, request_N


@pytest.mark.parametrize(("colder", "hotter", "share"), [(0.85, 1.18, 1), (0.7, 1.4, 0.2)])
def test_opposite_temperatures_of_requests_are_found_though_they_cancel(colder, hotter, share):
    for seed in range(3):
        u_N, *best, token_N, request_N = requests_drawn(seed, colder, hotter, share)
        factors_JN, known_N = likelihood_ratio.log_factors(*best, token_N)
        apart = by_request(log_densities(u_N), OPPOSITE, request_N)
        top = by_request(factors_JN, likelihood_ratio.OPPOSITE, request_N[known_N])

        assert Fidelity.of(u_N).log_e < math.log(20)
        assert log_mean_exp(apart) > math.log(1000) and log_mean_exp(top) > math.log(1000)


def test_requests_that_are_sampled_as_reported_are_seldom_rejected():
    """Ville: with probability 1/20 at most; 100 runs, of which at most 11 by chance (1e-3)."""
    found = 0
    for seed in range(100):
        u_N, _, _, _, request_N = requests_drawn(seed, 1, 1, 0, requests=60, tokens=12)
        apart = by_request(log_densities(u_N), OPPOSITE, request_N)
        found += log_mean_exp(apart) >= math.log(20)
    assert found <= 11


def test_a_request_has_a_mean_of_one():
    """Over all sequences of two tokens of a law of three, by enumeration."""
    law = np.array([0.5, 0.3, 0.2])
    faulty = np.array([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]])
    log_JV = np.log(faulty / law)

    mean = sum(
        law[a] * law[b] * np.exp(by_request(log_JV[:, [a, b]], [(0, 1)], np.array([3, 3])))
        for a in range(3)
        for b in range(3)
    )

    assert mean == pytest.approx([1, 1], abs=1e-12)
