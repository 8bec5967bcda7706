# Tails: oracles are enumeration over all outcomes, and draws from tails that fall, or do not.

import math

import numpy as np
import pytest
from scipy.stats import binom

from servanda.theory.stats.tails import (
    _MANY,
    DOUBT,
    KEPT,
    LEAST,
    RESPONSE_NATS,
    RESPONSE_PAIRS,
    TOKEN_NATS,
    TOKEN_PAIRS,
    FarToken,
    Tails,
    _log_e,
    _rare,
    counted,
    falls,
    finds,
)


def of(size_N, mean_S=()):
    size_N, mean_S = np.asarray(size_N), np.asarray(mean_S)
    counts = counted(size_N, TOKEN_NATS), counted(mean_S, RESPONSE_NATS)
    return Tails(len(size_N), counts[0], len(mean_S), counts[1])


@pytest.mark.parametrize("pair", [*TOKEN_PAIRS, *RESPONSE_PAIRS])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_at_the_border_of_the_null_the_expected_evidence_is_one(pair, n):
    # every number k of n tokens beyond the far level, with its probability
    e_K = np.exp([_log_e(*pair, n, k) for k in range(n + 1)])
    assert binom.pmf(np.arange(n + 1), n, falls(*pair)) @ e_K == pytest.approx(1.0, rel=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "noise",
    [
        lambda rng, n: rng.normal(0, 0.05, n),
        lambda rng, n: rng.laplace(0, 0.1, n),
        lambda rng, n: 0.05 * rng.standard_t(2, n),
        lambda rng, n: 0.3 * rng.standard_t(2.5, n),
        # a mixture of experts: one token in 500 takes another expert, and differs by about a nat
        lambda rng, n: np.where(
            rng.random(n) < 0.002, rng.exponential(1.0, n), rng.normal(0, 0.05, n)
        ),
    ],
    ids=["normal", "laplace", "student-2", "student-2.5", "experts"],
)
def test_noise_whose_tail_falls_is_no_finding(noise):
    rng = np.random.default_rng(7)
    found = sum(finds(of(np.abs(noise(rng, 50_000))).log_e) for _ in range(200))
    assert found == 0  # 200 runs at an error probability of at most .001 each


@pytest.mark.parametrize("k", [1, 3, 4, 8])
def test_a_handful_of_far_tokens_is_a_finding_and_fewer_are_not(k):
    rng = np.random.default_rng(1)
    size_N = np.abs(rng.normal(0, 0.03, 20_000))
    size_N[:k] = 9.0
    assert finds(of(size_N).log_e) == (k >= 3)


def test_one_token_that_no_noise_reaches_is_a_finding_only_beside_quiet_ones():
    rng = np.random.default_rng(2)
    quiet_N, loud_N = np.abs(rng.normal(0, 0.005, 9999)), np.abs(rng.normal(0, 0.2, 9999))
    assert finds(of(np.append(quiet_N, np.inf)).log_e)
    assert not finds(of(np.append(loud_N, 20.0)).log_e)


def test_responses_that_are_moderately_off_are_found_by_their_means():
    rng = np.random.default_rng(3)
    mean_S = np.abs(rng.normal(0.02, 0.004, 5000))
    assert not finds(of(np.zeros(99), mean_S).log_e)
    mean_S[:5] = 0.7
    tails = of(np.zeros(99), mean_S)
    assert finds(tails.log_e)
    assert tails.clearest == ("response", 0.0625, 0.25, 5, 5)


@pytest.mark.parametrize("pair", TOKEN_PAIRS)
@pytest.mark.parametrize("n", [1, 2, 30, 900])
def test_what_noise_would_rarely_give_is_that_of_a_binomial_variable(pair, n):
    share = falls(*pair)
    for k in range(1, min(n, 90) + 1):
        assert _rare(n, k, share) == (binom.sf(k - 1, n, share) < DOUBT), k
    many = 40 * _MANY * round(1 / share)
    rare = [k for k in range(4000, 4300) if _rare(many, k, share)]
    assert rare[0] == pytest.approx(binom.isf(DOUBT, many, share), abs=3)


def test_parts_add_up_in_any_order_and_keep_the_furthest():
    rng = np.random.default_rng(4)

    def part(i):
        size_N = rng.exponential(3.0, 50)
        worst = tuple(
            FarToken(float(x), i, f"{i}:{j}", j, j, -x, 0.0) for j, x in enumerate(size_N)
        )
        return Tails(50, counted(size_N, TOKEN_NATS), 5, (5, 5, 4, 4, 1, 0), 3, worst)

    parts = [part(i) for i in range(6)]
    whole, back = sum(parts, Tails()), sum(parts[::-1], Tails())
    assert whole == back
    every = sorted((far for p in parts for far in p.worst), reverse=True)
    assert [*whole.worst] == every[:KEPT]
    assert whole.tokens == 300


def test_nothing_is_beyond_without_a_number():
    assert counted(np.array([np.nan, np.inf, 3.0]), (1.0, 4.0)) == (2, 1)
    assert Tails().log_e == pytest.approx(0.0)
    assert LEAST > 1
    assert math.isclose(falls(0.25, 8.0), 1 / 1024)
