# Coherence: weights of two distributions average at most 1, and others are found out.

import math

import numpy as np
import pytest

from servanda.theory.sampling import Sampling, draw, processed_logprobs
from servanda.theory.stats.bets import Coherence

VOCABULARY = 60
RAW = Sampling()
COLD = Sampling(temperature=0.6)


def ratios(rng, n, train, infer, real, spread=2.0):
    """log p - log q of n tokens drawn with `real`, where the sides report those transforms."""
    logits = rng.normal(size=(n, VOCABULARY)) * spread
    tokens = draw(processed_logprobs(logits, real), rng.random(n))
    sides = (processed_logprobs(logits, side)[np.arange(n), tokens] for side in (train, infer))
    train_N, infer_N = sides
    return train_N - infer_N


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "infer"),
    [
        (RAW, RAW),
        (COLD, RAW),  # another temperature of train is another distribution, and coherent
        (RAW, COLD),
        (RAW, Sampling(top_p=0.9)),
    ],
)
def test_two_distributions_are_rejected_no_more_often_than_alpha(train, infer):
    rng = np.random.default_rng(12)
    runs, alpha, wrong = 400, 0.05, 0
    for _ in range(runs):
        log_ratio = ratios(rng, 200, train, infer, infer)
        rounds = [Coherence.of(log_ratio[i : i + 20]) for i in range(0, 200, 20)]
        grown = np.array([r.growth for r in rounds]).cumsum(axis=0)
        wrong += np.log(np.exp(grown).mean(axis=1)).max() >= math.log(1 / alpha)
    assert wrong / runs <= alpha + 2.33 * math.sqrt(alpha * (1 - alpha) / runs)


@pytest.mark.parametrize(
    ("train", "infer", "real", "tokens"),
    [
        (COLD, RAW, COLD, 100),  # infer reports raw logprobs of what it drew processed
        (Sampling(top_p=0.9), RAW, Sampling(top_p=0.9), 300),
        (Sampling(temperature=0.9), RAW, COLD, 300),
    ],
)
def test_raw_logprobs_beside_processed_ones_are_seen(train, infer, real, tokens):
    log_ratio = ratios(np.random.default_rng(13), tokens, train, infer, real)
    assert Coherence.of(log_ratio).log_e >= math.log(1000)


def test_probabilities_that_add_up_to_more_than_1_are_seen():
    """Train divides its logprobs, not its logits, by a temperature above 1."""
    rng = np.random.default_rng(14)
    logp = processed_logprobs(rng.normal(size=(200, VOCABULARY)), RAW)
    own = logp[np.arange(200), draw(logp, rng.random(200))]
    assert Coherence.of(own / 1.3 - own).log_e >= math.log(1000)


def test_no_single_token_rejects():
    assert Coherence.of(np.array([700.0])).log_e < math.log(10)


def test_a_token_without_train_mass_is_charged_as_one_that_is_missing():
    gone, lost = Coherence.of(np.array([-math.inf])), Coherence.of(np.zeros(0), missing=1)
    assert gone.growth == pytest.approx(lost.growth)
    assert (gone.n, lost.n, lost.missing) == (1, 0, 1)


@pytest.mark.slow
def test_rounding_to_float32_is_no_evidence():
    """Every weight a float32's rounding above 1, for a million tokens."""
    assert Coherence.of(np.full(1_000_000, 1e-6)).log_e <= 1e-3
