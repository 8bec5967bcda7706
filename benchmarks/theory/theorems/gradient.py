# Policy gradients, token by token: theorems that no verdict uses.

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.gradient import clip_logs
from servanda.theory.bounds.theorem import Floats, given, theorem


@theorem("certificate", assumes=("sampler", "same_tokens", "one_ratio"), sharp=True)
def ppo_clip_bias(
    log_ratio_N: ArrayLike,
    advantage_N: ArrayLike,
    low: float,
    high: float,
    largest: float,
) -> Floats:
    """The share of a gradient that PPO's clip drops before the first update; mean over tokens.

    With r = train / infer, min(r A, clip(r) A) has no gradient where A > 0 and r > 1 + high,
    or A < 0 and r < 1 - low.  The bias is at most advantage x score norm x the train mass of
    those tokens and of what infer cannot draw: the mean of 1 - w 1(not clipped).

    Args:
        log_ratio_N: log p - log q of the sampled tokens, nats; -inf where train has no mass.
        advantage_N: of the same tokens; only its sign is read.
        low, high: the clip range, [1 - low, 1 + high].
        largest: w is cut to this value, finite and at least 1, since no sample bounds the mean
            of a weight that has no largest one (A < 0); the bound can only grow.

    Returns:
        [N], within [1 - largest, 1]; a single value may be negative.

    Raises:
        EvidenceError: a log ratio or an advantage is NaN, or `largest` is below 1 or endless.

    >>> ppo_clip_bias(np.log([2.0, 2.0, 0.5]), [1.0, -1.0, -1.0], 0.2, 0.28, 1.5).tolist()
    [1.0, -0.5, 1.0]
    """
    low_log, high_log = clip_logs(low, high)
    hint = "no sample bounds the mean of a weight without a largest value: give one, such as 2"
    largest = float(given("largest", largest, 1.0, sys.float_info.max, hint))
    log_ratio_N = given("log_ratio", log_ratio_N, low=-math.inf)
    sign_N = np.sign(given("advantage", advantage_N, low=-math.inf))
    clipped_N = (sign_N > 0) & (log_ratio_N > high_log) | (sign_N < 0) & (log_ratio_N < low_log)
    kept_N = np.minimum(log_ratio_N, np.log(largest))
    with np.errstate(over="ignore"):
        return np.where(clipped_N, 1.0, -np.expm1(kept_N))[()]


@theorem("fact", sharp=True)
def score_norm2_logits(logp_token: ArrayLike, sum_p2: ArrayLike) -> Floats:
    """The squared norm of grad log p of a token in logits, 1 - 2p + |p|^2; at most 2.

    Times the squared norm of the last hidden state it is that of the whole LM head; a bound
    for a network needs its Jacobian.

    Args:
        logp_token: log p of the token, nats.
        sum_p2: |p|^2, the sum of squared probabilities of the same context.

    >>> score_norm2_logits(np.log([0.5, 0.25]), [0.375, 0.375]).round(4).tolist()
    [0.375, 0.875]
    """
    logp = given("logp_token", logp_token, low=-math.inf, high=0.0)
    # (1 - p)^2 and the other tokens' p^2: 1 - 2p + |p|^2 has no correct digit near p = 1
    others = given("sum_p2", sum_p2, high=1.0) - np.exp(2.0 * logp)
    return np.expm1(logp) ** 2 + np.maximum(others, 0.0)


@theorem("fact", assumes=("true_top_k",), sharp=True)
def sum_p2_from_top_k(logp_NK: ArrayLike) -> tuple[Floats, Floats]:
    """|p|^2 is between that of the top-k tokens and that plus their smallest mass times the rest.

    Args:
        logp_NK: log p of the k likeliest tokens of each position, in any order, [..., K]; -inf
            fills a row that has fewer.

    Returns:
        Lower and upper end, [...].  No token of the rest is likelier than the smallest of
        the k, nor than the rest itself.

    Raises:
        EvidenceError: K is 0, or a logprob is above 0 or NaN.

    >>> low, high = sum_p2_from_top_k(np.log([0.5, 0.25]))
    >>> (round(float(low), 4), round(float(high), 4))
    (0.3125, 0.375)
    """
    p_NK = np.exp(given("logp", logp_NK, low=-math.inf, high=0.0))
    if not p_NK.shape or not p_NK.shape[-1]:
        raise EvidenceError(
            f"logprobs of shape {p_NK.shape}: no token of a position was returned",
            hint="ask for the logprobs of at least one token, [..., K]",
        )
    rest_N = np.maximum(1.0 - p_NK.sum(axis=-1), 0.0)
    low_N = (p_NK**2).sum(axis=-1)
    least_N = np.where(p_NK > 0.0, p_NK, np.inf).min(axis=-1)
    return low_N, low_N + rest_N * np.minimum(least_N, rest_N)
