# Policy gradients per token: the bias from a gap of weights, and the effect of a clip.
#
# At a context c the trainer wants E_p[A g], g = grad log p of the token, and computes
# E_q[psi(w) A g].  The difference is at most advantage x score norm x D_psi, whatever the
# advantages are: D_psi = sum |p - q psi(w)| (see importance_weights.py).

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.domain import Floats, given, product
from servanda.theory.bounds.theorem import theorem

Loss = Literal["token_mean", "sequence_sum", "sequence_mean"]
Std = Literal["sample", "population"]

# the largest norm of grad log p in the space of logits, |e_a - p|
LOGIT_SCORE_NORM = math.sqrt(2.0)


@theorem("conditional bound", assumes=("advantage", "score_norm", "token_level"), sharp=True)
def policy_gradient_bias(gap: ArrayLike, advantage: ArrayLike, score_norm: ArrayLike) -> Floats:
    """The bias of a policy gradient is at most gap x advantage x score norm.

    At one context, or on average over contexts as infer draws them.  It is the norm of a
    difference of expected gradients, in the unit of advantage x score norm.

    Args:
        gap: D_psi, or its mean: see `weight_gap`.
        advantage: the largest |advantage| of a token.
        score_norm: the largest norm of grad log p of a token.

    Returns:
        0 wherever one of them is 0, whatever the others are.

    >>> policy_gradient_bias(0.02, 2.5, LOGIT_SCORE_NORM).round(4).item()
    0.0707
    """
    A, G = given("advantage", advantage), given("score_norm", score_norm)
    return product(given("gap", gap), A, G)


@theorem(
    "conditional bound", assumes=("advantage", "score_norm", "token_level", "constant_divisor")
)
def loss_weights(loss: Loss, length_S: ArrayLike) -> Floats:
    """The weight of each token's gap in the bias, by the divisor of the loss.

    token_mean: 1 for each, then the mean over the tokens of all responses.  sequence_sum: 1,
    then the sum over a response and the mean over responses.  sequence_mean (GRPO): 1/t at the
    t-th token, then as sequence_sum.  Times advantage x score norm, each bounds the bias.

    The divisor |y| of sequence_mean depends on the sampled tokens, so the mean gap of a response is
    no bound.  Given the prefix, a token a at step t moves the gradient by (q psi - p)(a) A g
    E[1/|y| | prefix, a]; a response with a t-th token has length at least t, so the last factor is
    at most 1/t.  Only sequence_mean needs no constant divisor.

    Args:
        loss: the contract's name.
        length_S: tokens of each response, including the end-of-text step.

    Returns:
        [N], the tokens of all responses, concatenated.

    Raises:
        EvidenceError: an unknown loss, or a length that is not a whole number.

    >>> loss_weights("sequence_mean", [2, 3]).round(3).tolist()
    [1.0, 0.5, 1.0, 0.5, 0.333]
    """
    length_S = given("length", length_S, low=1.0, hint="drop answers without a token")
    if (length_S % 1).any():
        raise EvidenceError(f"an answer has {length_S[length_S % 1 > 0][0]:g} tokens")
    if loss in ("token_mean", "sequence_sum"):
        return np.ones(int(length_S.sum()))
    if loss != "sequence_mean":
        raise EvidenceError(
            f"no loss is named {loss!r}", hint="known: token_mean, sequence_sum, sequence_mean"
        )
    steps = [np.arange(1.0, length + 1.0) for length in length_S.ravel()]
    return 1.0 / np.concatenate([np.zeros(0), *steps])


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
    those tokens and of tokens that infer cannot sample: the mean of 1 - w 1(not clipped).

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
    low_log, high_log = _clip_logs(low, high)
    hint = "no sample bounds the mean of a weight without a largest value: give one, such as 2"
    largest = float(given("largest", largest, 1.0, sys.float_info.max, hint))
    log_ratio_N = given("log_ratio", log_ratio_N, low=-math.inf)
    sign_N = np.sign(given("advantage", advantage_N, low=-math.inf))
    clipped_N = (sign_N > 0) & (log_ratio_N > high_log) | (sign_N < 0) & (log_ratio_N < low_log)
    kept_N = np.minimum(log_ratio_N, np.log(largest))
    with np.errstate(over="ignore"):
        return np.where(clipped_N, 1.0, -np.expm1(kept_N))[()]


def _clip_logs(low: float, high: float) -> tuple[float, float]:
    """The logs of 1 - low and 1 + high; a range below 0 does not bind."""
    low, high = float(given("low", low)), float(given("high", high))
    return (math.log1p(-low) if low < 1.0 else -math.inf), math.log1p(high)


@dataclass(frozen=True)
class RatioBudget:
    """The part of a clip range that the gap between the kernels leaves for the policy's update.

    Args:
        used_up: fraction of log(1 + high) that the gap may take; used_down: of -log(1 - low).
        low, high: an update whose ratio is in [1 - low, 1 + high] is never clipped, for any kernels
            within rho; negative if nothing is left.
    """

    used_up: Floats
    used_down: Floats
    low: Floats
    high: Floats


@theorem("conditional bound", assumes=("every_context", "one_ratio"), sharp=True)
def ratio_budget(rho: ArrayLike, low: float, high: float) -> RatioBudget:
    """A clip range is shared: the part used by the kernel gap is not available to the update.

    Args:
        rho: the largest |log p - log q|, nats.
        low, high: the clip range, [1 - low, 1 + high].

    Raises:
        EvidenceError: rho or the range is negative, or the range has no width on a side.

    >>> budget = ratio_budget(0.1, 0.2, 0.28)
    >>> [round(float(x), 3) for x in (budget.used_down, budget.used_up, budget.low, budget.high)]
    [0.448, 0.405, 0.116, 0.158]
    """
    rho = given("rho", rho)
    low_log, high_log = _clip_logs(low, high)
    if not (low > 0 and high > 0):
        raise EvidenceError(
            f"a clip range of [{low:g}, {high:g}] has no width on one side",
            hint="give both distances from 1, such as 0.2 and 0.28",
        )
    return RatioBudget(
        used_up=rho / high_log,
        used_down=rho / -low_log,
        low=-np.expm1(low_log + rho) if low < 1.0 else np.ones_like(rho)[()],
        high=np.expm1(high_log - rho),
    )


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
    """|p|^2 is between that of the top-k tokens and that plus smallest x rest.

    Args:
        logp_NK: log p of the top-k tokens of each position, in any order, [..., K]; -inf fills a
            row with fewer.

    Returns:
        Lower and upper bound, [...].  No token of the rest is likelier than the smallest of the k,
        nor than the rest itself.

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


@theorem("fact", sharp=True)
def group_advantage_bound(group_size: int, std: Std = "sample") -> float:
    """The largest |advantage| normalised in a group of n: (n-1)/sqrt(n), or sqrt(n-1).

    Args:
        group_size: n >= 2 responses to one prompt.
        std: the divisor, n - 1 (sample) or n (population).

    Raises:
        EvidenceError: the group has fewer than two responses, or not a whole number.

    >>> [round(group_advantage_bound(8, std), 3) for std in ("sample", "population")]
    [2.475, 2.646]
    """
    size = float(given("group_size", group_size, low=2.0, hint="one answer has no advantage"))
    if not size.is_integer():
        raise EvidenceError(f"a group has {size:g} answers", hint="give a whole number of them")
    n = int(size)
    return (n - 1) / math.sqrt(n) if std == "sample" else math.sqrt(n - 1)
