# Fidelity from reported best tokens: quiet where they are true, quick where they are not.

import math

import numpy as np
import pytest

from servanda.errors import EvidenceError
from servanda.theory.sampling import Sampling, draw, processed_logprobs
from servanda.theory.stats.bets import LEAK
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio

VOCABULARY = 200
HONEST, CUT = Sampling(), Sampling(temperature=0.8, top_p=0.9)


def drawn(rng, n, reported, real, k=20, spread=2.5, stored=np.float64):
    """(ids, logprobs, tokens) of n steps: what is reported of the best, and what is drawn."""
    logits = rng.normal(size=(n, VOCABULARY)) * spread
    tokens = draw(processed_logprobs(logits, real), rng.random(n))
    logp = processed_logprobs(logits, reported)
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(logp, ids, axis=1).astype(stored).astype(np.float64), tokens


@pytest.mark.slow
@pytest.mark.parametrize(("k", "honest"), [(1, HONEST), (20, CUT), (VOCABULARY, HONEST)], ids=str)
def test_a_true_report_is_rejected_no_more_often_than_alpha(k, honest):
    """At the largest e-value of any prefix of 10 rounds, over 200 seeded runs."""
    rng = np.random.default_rng(11)
    runs, alpha, wrong = 200, 0.05, 0
    for _ in range(runs):
        steps = drawn(rng, 300, honest, honest, k, stored=np.float32)
        rounds = [LikelihoodRatio.of(*(x[i : i + 30] for x in steps)) for i in range(0, 300, 30)]
        grown = np.array([r.growth for r in rounds]).cumsum(axis=0)
        wrong += np.log(np.exp(grown).mean(axis=1)).max() >= math.log(1 / alpha)
    assert wrong / runs <= alpha + 2.33 * math.sqrt(alpha * (1 - alpha) / runs)


def test_every_alternative_is_a_distribution_over_the_cells():
    """Enumerate the vocabulary instead of sampling it: the mean of each factor is at most 1."""
    rng = np.random.default_rng(2)
    logp = processed_logprobs(rng.normal(size=(1, 30)) * 2, HONEST)
    ids = np.argsort(-logp, axis=1)[:, :7]
    best = np.take_along_axis(logp, ids, axis=1)
    factors = [
        np.exp(LikelihoodRatio.of(ids, best, np.array([token])).growth) for token in range(30)
    ]
    mean = np.exp(logp[0]) @ np.array(factors)
    assert (mean <= 1 + 1e-12).all()
    assert mean == pytest.approx(np.ones(len(mean)), abs=0.02)
    assert min(map(np.min, factors)) >= LEAK


@pytest.mark.parametrize(
    ("reported", "real", "tokens"),
    [
        (HONEST, Sampling(temperature=0.95), 8000),
        (HONEST, Sampling(temperature=1.1), 2000),
        (HONEST, Sampling(top_p=0.95), 2000),
        (HONEST, Sampling(top_k=10), 600),
        (HONEST, Sampling(temperature=0.6), 50),  # raw reported, drawn from processed ones
        (Sampling(temperature=0.6), HONEST, 50),
    ],
)
def test_another_sampler_than_the_reported_one_is_seen(reported, real, tokens):
    steps = drawn(np.random.default_rng(5), tokens, reported, real)
    assert LikelihoodRatio.of(*steps).log_e >= math.log(1000)


def permuted(rng, n, k):
    """Tokens beyond the likeliest are drawn with each other's probabilities."""
    logp = processed_logprobs(rng.normal(size=(n, VOCABULARY)) * 0.5, HONEST)
    order = np.argsort(-logp, axis=1, kind="stable")
    turned = order[:, [0, *range(VOCABULARY - 1, 0, -1)]]
    real = np.empty_like(logp)
    np.put_along_axis(real, turned, np.take_along_axis(logp, order, axis=1), axis=1)
    ids = order[:, :k]
    apart = 0.5 * np.abs(np.exp(real) - np.exp(logp)).sum(axis=1).mean()
    steps = ids, np.take_along_axis(logp, ids, axis=1), draw(real, rng.random(n))
    return apart, LikelihoodRatio.of(*steps)


def test_with_one_token_returned_a_permuted_tail_is_never_seen():
    """The blind spot of a test on top-1: the masses of both cells are as reported."""
    apart, seen = permuted(np.random.default_rng(6), 5000, k=1)
    assert apart > 0.3
    assert seen.log_e < math.log(20)
    _, seen = permuted(np.random.default_rng(6), 5000, k=20)
    assert seen.log_e > math.log(1e6)


def test_a_token_that_the_report_leaves_no_mass_for_is_soon_too_much():
    best = np.log([[0.6, 0.4]] * 3)
    ids = np.array([[0, 1]] * 3)
    assert LikelihoodRatio.of(ids, best, np.array([2, 2, 2])).log_e > math.log(1e9)


def test_the_order_in_which_tokens_are_returned_does_not_count():
    ids, logp, tokens = drawn(np.random.default_rng(7), 50, HONEST, HONEST)
    turned = LikelihoodRatio.of(ids[:, ::-1], logp[:, ::-1], tokens)
    assert turned.growth == pytest.approx(LikelihoodRatio.of(ids, logp, tokens).growth)


def test_a_step_whose_logprobs_are_those_of_no_distribution_is_missing():
    ids = np.array([[0, 1], [0, 1], [0, 0], [0, 1]])
    logp = np.array([[np.nan, -1.0], [0.0, -1.0], [-1.0, -1.0], [-0.5, -np.inf]])
    found = LikelihoodRatio.of(ids, logp, np.array([0, 0, 0, 1]))
    assert (found.n, found.missing) == (2, 2)
    assert np.isfinite(found.growth).all()


def test_a_missing_token_is_charged_the_least_factor():
    steps = drawn(np.random.default_rng(8), 40, HONEST, Sampling(temperature=0.6))
    whole, short = LikelihoodRatio.of(*steps), LikelihoodRatio.of(*steps, missing=1)
    assert np.array(short.growth) == pytest.approx(np.array(whole.growth) + math.log(LEAK))


def test_rounds_add_up_and_none_is_no_evidence():
    ids, logp, tokens = drawn(np.random.default_rng(9), 40, HONEST, HONEST)
    parts = [LikelihoodRatio.of(ids[s], logp[s], tokens[s]) for s in (slice(15), slice(15, 40))]
    whole = LikelihoodRatio.of(ids, logp, tokens)
    assert sum(parts, LikelihoodRatio()).growth == pytest.approx(whole.growth)
    assert LikelihoodRatio().log_e == -math.inf


@pytest.mark.parametrize("absent", [-np.inf, np.nan])
def test_a_drawn_token_that_was_appended_to_the_best_is_refused(absent):
    """As servers do that return k logprobs and the sampled one beside them."""
    rng = np.random.default_rng(5)
    logp = processed_logprobs(rng.normal(size=(600, VOCABULARY)) * 2.5, HONEST)
    token_N = draw(logp, rng.random(600))
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :5]
    best = np.take_along_axis(logp, ids, axis=1)
    outside_N = ~(ids == token_N[:, None]).any(axis=1)
    own_N = np.where(outside_N, logp[np.arange(600), token_N], absent)
    more = np.column_stack([ids, np.where(outside_N, token_N, -1)]), np.column_stack([best, own_N])
    told = f"the drawn one in all of the {outside_N.sum()} of 600 steps that have it"
    with pytest.raises(EvidenceError, match=told) as caught:
        LikelihoodRatio.of(*more, token_N)
    assert "drop the appended token" in str(caught.value)
    assert LikelihoodRatio.of(ids, best, token_N).log_e < math.log(20)


def test_a_last_token_that_is_drawn_once_by_chance_is_not_refused():
    """A cut tail leaves the second token at one step of two, and there it is drawn."""
    ids = np.array([[0, 1], [0, 1]])
    logp = np.log(np.array([[0.9, 0.1], [1.0, 1e-300]]))
    logp[1, 1] = -np.inf
    assert LikelihoodRatio.of(ids, logp, np.array([1, 0])).n == 2
