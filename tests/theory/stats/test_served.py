# The served tokens under the reference: honest candidates are not rejected, however they differ.

import math

import numpy as np
import pytest

from servanda.theory.sampling import Sampling, columns_of, draw, processed_logprobs
from servanda.theory.stats.bets import LEAK
from servanda.theory.stats.likelihood_ratio import log_factors
from servanda.theory.stats.pit import Served, log_densities

VOCABULARY = 40
RAW = Sampling()


def kernels(rng, n, apart):
    """Logprobs of train and of infer, [n, V] each."""
    logits = rng.normal(size=(n, VOCABULARY)) * 2.0
    other = logits + rng.normal(size=logits.shape) * apart
    return processed_logprobs(logits, RAW), processed_logprobs(other, RAW)


def evidence(rng, n, apart=0.3, real=RAW, by="rank"):
    """Of n tokens that infer draws by `real`, and reports as if drawn at temperature 1."""
    train_NV, infer_NV = kernels(rng, n, apart)
    token_N = draw(processed_logprobs(infer_NV, real), rng.random(n))
    ratio_N = train_NV[np.arange(n), token_N] - infer_NV[np.arange(n), token_N]
    if by == "rank":
        seen = columns_of(train_NV, token_N)
        u_N = seen["mass_before"] + rng.random(n) * np.exp(seen["logp"])
        return Served.of(log_densities(np.minimum(u_N, 1)), ratio_N)
    best_NK = np.argsort(-train_NV, axis=1, kind="stable")[:, :8]
    factors_JN, usable_N = log_factors(best_NK, np.take_along_axis(train_NV, best_NK, 1), token_N)
    assert usable_N.all()
    return Served.of(factors_JN, ratio_N)


def test_every_factor_has_a_mean_of_at_most_one_under_an_honest_candidate():
    """By enumeration: all tokens of one step, and the uniform on a fine grid."""
    rng = np.random.default_rng(5)
    v_M = (np.arange(400) + 0.5) / 400
    for _ in range(50):
        (train_V,), (infer_V,) = kernels(rng, 1, apart=1.5)
        seen = columns_of(np.tile(train_V, (VOCABULARY, 1)), np.arange(VOCABULARY))
        mean_J = 0.0
        for token in range(VOCABULARY):
            u_M = seen["mass_before"][token] + v_M * math.exp(train_V[token])
            ratio = np.full(len(v_M), train_V[token] - infer_V[token])
            factors = (1 - LEAK) * np.exp(log_densities(np.minimum(u_M, 1)) + ratio) + LEAK
            mean_J = mean_J + math.exp(infer_V[token]) * factors.mean(axis=1)
        assert (mean_J <= 1 + 2e-3).all()  # the grid's own error


@pytest.mark.slow
@pytest.mark.parametrize("by", ["rank", "best"])
@pytest.mark.parametrize("apart", [0.0, 0.1, 1.0])
def test_a_candidate_that_reports_what_it_draws_is_rejected_no_more_often_than_alpha(by, apart):
    rng, alpha, runs = np.random.default_rng(7), 0.05, 200
    wrong = sum(
        peak_of([evidence(rng, 40, apart, by=by) for _ in range(8)]) >= math.log(1 / alpha)
        for _ in range(runs)
    )
    assert wrong / runs <= alpha + 2.33 * math.sqrt(alpha * (1 - alpha) / runs)


@pytest.mark.parametrize("by", ["rank", "best"])
@pytest.mark.parametrize("real", [Sampling(temperature=0.8), Sampling(top_p=0.9)])
def test_an_undisclosed_sampler_is_found_through_the_difference_of_the_kernels(by, real):
    rng = np.random.default_rng(11)
    assert evidence(rng, 4000, apart=0.1, real=real, by=by).log_e > math.log(1000)


def test_a_token_that_never_came_back_only_takes_evidence_away():
    rng = np.random.default_rng(3)
    whole = evidence(rng, 100)
    assert Served.of(np.zeros((1, 0)), np.zeros(0), missing=3).growth == pytest.approx(
        (3 * math.log(LEAK),)
    )
    assert (whole + Served(missing=2)).missing == 2


def test_a_token_to_which_the_reference_gives_no_mass_is_worth_the_leak():
    found = Served.of(np.zeros((2, 1)), np.array([-np.inf]))
    assert found.growth == pytest.approx((math.log(LEAK),) * 2)


def peak_of(rounds):
    grown = np.array([r.growth for r in rounds]).cumsum(axis=0)
    return max(np.logaddexp.reduce(row) - math.log(len(row)) for row in grown)
