# Policy gradients of whole responses: the bias against the gradient of the expected reward.
#
# J = E_P R over sequences, S = sum of grad log p over a response, W = P / Q.  The gradient is
# E_P[R S]; a trainer that samples from infer computes E_Q[weight R S].  `advantage` bounds |R| (or
# its replacement), `score_norm` one token's |grad log p|, `score_norm_sum` |S|, at most tokens x
# score_norm.

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.bounds.gradient import Std, group_advantage_bound
from servanda.theory.bounds.theorem import Floats, given, product, theorem


def _lost(mean_weight: ArrayLike) -> Floats:
    return np.maximum(1.0 - given("mean_capped_weight", mean_weight), 0.0)


@theorem("conditional bound", assumes=("advantage", "score_norm"))
def sequence_naive_bias(
    tv_seq: ArrayLike,
    chi2_seq: ArrayLike,
    tokens: ArrayLike,
    advantage: ArrayLike,
    score_norm: ArrayLike,
    fisher: ArrayLike = math.inf,
) -> Floats:
    """Without a correction: at most A min(2 G T TV, G sqrt(T chi2), sqrt(chi2 fisher)).

    The last two use that S is a martingale under P, so E|S|^2 <= T G^2: they grow as T does,
    where T x TV grows as its square.

    Args:
        tv_seq: TV(P, Q) of whole responses, in [0, 1].
        chi2_seq: chi2(infer || train) = E_P (Q/P - 1)^2 of whole responses; inf if train cannot
            sample some response, or if unknown.
        tokens: T, the most tokens of a response.
        advantage, score_norm: A and G.
        fisher: largest eigenvalue of E_P[S S'], if known.
    """
    tv, chi2 = given("tv_seq", tv_seq, high=1.0), given("chi2_seq", chi2_seq)
    T = given("tokens", tokens, low=1.0)
    A, G = given("advantage", advantage), given("score_norm", score_norm)
    fisher = given("fisher", fisher)
    known = ~np.isinf(chi2)  # an infinite chi2 gives no bound, whatever its factor
    by_tokens = np.where(known, product(G, np.sqrt(T), np.sqrt(chi2)), math.inf)
    by_fisher = np.where(known, product(np.sqrt(chi2), np.sqrt(fisher)), math.inf)
    by_variation = product(2.0, G, T, tv)
    return product(A, np.minimum(np.minimum(by_variation, by_tokens), by_fisher))


@theorem("conditional bound", assumes=("advantage", "score_norm"), sharp=True)
def sequence_tis_bias(
    mean_capped_weight: ArrayLike, advantage: ArrayLike, score_norm_sum: ArrayLike
) -> Floats:
    """With min(W, C) of whole responses: at most A sup|S| (1 - E_infer min(W, C)).

    P - Q min(W, C) is nowhere negative, also for responses that infer cannot sample, and sums to
    the last factor.

    Args:
        mean_capped_weight: E_infer min(W, C), or a lower bound of it.
        advantage: the largest |R|.
        score_norm_sum: the largest |S| of a response.
    """
    norm = given("score_norm_sum", score_norm_sum)
    return product(given("advantage", advantage), norm, _lost(mean_capped_weight))


@theorem("conditional bound", assumes=("advantage", "score_norm"), sharp=True)
def sequence_mis_bias(
    mass_outside: ArrayLike, advantage: ArrayLike, score_norm_sum: ArrayLike
) -> Floats:
    """With W inside a band, else 0: at most A sup|S| P(W outside the band).

    Args:
        mass_outside: P(W not in the band) = 1 - E_infer[W 1(in the band)], in [0, 1]; it
            counts responses that infer cannot sample.
        advantage: the largest |R|.
        score_norm_sum: the largest |S| of a response.
    """
    mass = given("mass_outside", mass_outside, high=1.0)
    return product(given("advantage", advantage), given("score_norm_sum", score_norm_sum), mass)


@theorem("conditional bound", assumes=("advantage", "score_norm", "every_context"))
def token_is_trajectory_bias(
    token_tv_max: ArrayLike,
    tokens: ArrayLike,
    advantage: ArrayLike,
    score_norm: ArrayLike,
    left: ArrayLike,
) -> Floats:
    """The bias of token-level weights against the gradient of the expected reward.

    A G (2 T min(1, (T-1) TV) + left): the weight of token t corrects the action, but neither its
    prefix nor its continuation, so one of T steps is corrected and the order in T remains.

    Args:
        token_tv_max: the largest TV of one token at any context.
        tokens: T, the most tokens of a response.
        advantage: the largest |R| of a response, credited to each of its tokens.
        score_norm: G, of one token.
        left: the remaining gap at the tokens themselves, E_infer of the sum over a response of 1 -
            min(w, C); 0 for importance weights if infer can sample every token of train.
    """
    tv, T = given("token_tv_max", token_tv_max, high=1.0), given("tokens", tokens, low=1.0)
    A, G = given("advantage", advantage), given("score_norm", score_norm)
    others = np.minimum(1.0, product(T - 1.0, tv))
    return product(A, G, product(2.0, T, others) + given("left", left))


@theorem("conditional bound", assumes=("score_norm",))
def grpo_bias(
    tv_seq: ArrayLike,
    group_size: int,
    score_norm_sum: ArrayLike,
    std: Std = "sample",
    *,
    whole_group: bool = False,
) -> Floats:
    """Advantages normalised in a group: at most 2 A sup|S| TV, A the bound of a group.

    Args:
        tv_seq: TV(P, Q) of whole responses, in [0, 1].
        group_size: n responses to one prompt; std: the divisor of their advantages.
        score_norm_sum: the largest |S| of a response.
        whole_group: whether to compare with a group sampled by train, so that TV becomes at most n
            TV; otherwise with one in which train sampled the response itself and infer the n - 1
            others.
    """
    tv, A = given("tv_seq", tv_seq, high=1.0), group_advantage_bound(group_size, std)
    if whole_group:
        tv = np.minimum(group_size * tv, 1.0)
    return product(2.0, A, given("score_norm_sum", score_norm_sum), tv)


@theorem("conditional bound", assumes=("score_norm",), sharp=True)
def rloo_bias(tv_seq: ArrayLike, centred_reward: ArrayLike, score_norm_sum: ArrayLike) -> Floats:
    """Rewards minus the mean of the others: at most 2 max|R - E_infer R| sup|S| TV.

    E_P S = 0, so the bias is the sum of (Q - P)(R - E_Q R) S.  The same holds for Dr. GRPO, whose
    mean includes the response, against (1 - 1/n) of the gradient.

    Args:
        tv_seq: TV(P, Q) of whole responses, in [0, 1].
        centred_reward: the largest |R - E_infer R|; at most the range of the reward.
        score_norm_sum: the largest |S| of a response.
    """
    centred, norm = given("centred_reward", centred_reward), given("score_norm_sum", score_norm_sum)
    return product(2.0, centred, norm, given("tv_seq", tv_seq, high=1.0))
