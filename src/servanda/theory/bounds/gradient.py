# Policy gradients, token by token: what a gap of weights can bend, and what a clip uses up.
#
# At a context c the trainer wants E_p[A g], g = grad log p of the token, and computes
# E_q[psi(w) A g].  The difference is at most advantage x score norm x D_psi, whatever the
# advantages are: D_psi = sum |p - q psi(w)| (see importance_weights.py).  The same holds for any
# factor h(c, a) in place of A: |E_q[psi h g] - E_p[h g]| <= sup|h| x sup|g| x D_psi.

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.drift import above_zero
from servanda.theory.bounds.theorem import Floats, given, product, theorem

Loss = Literal["token_mean", "sequence_sum", "sequence_mean"]
Std = Literal["sample", "population"]

# the largest norm of grad log p in the space of logits, |e_a - p|
LOGIT_SCORE_NORM = math.sqrt(2.0)
_FINITE = sys.float_info.max
_GAP = "the gap is that of `weight_gap`, never negative: cut a signed upper end at 0"
_SIZE = "give the largest absolute value: of advantages, or of the norm of grad log p"


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


@theorem("conditional bound", assumes=("advantage", "score_norm", "token_level"), sharp=True)
def clipped_gradient_bias(
    gap: ArrayLike, advantage: ArrayLike, score_norm: ArrayLike, high: ArrayLike, dual: ArrayLike
) -> Floats:
    """With weights psi beside PPO's clip: at most gap x A max(1 + high, dual) x score norm.

    At every step of every epoch (decoupled mode): the ratio r = new policy / train is clipped, and
    psi(train / infer) multiplies the loss.  Its gradient is r A g where the clip leaves it: r is at
    most 1 + high where A > 0, and at most the dual clip where A < 0.  The bias is against the same
    loss on tokens that train sampled.

    Args:
        gap: D_psi of train against infer, or its mean; it does not change over the epochs.
        advantage: A, the largest |advantage| of a token.
        score_norm: the largest norm of grad log of the policy that is updated.
        high: the upper end of the clip range is 1 + high.
        dual: the largest ratio whose token keeps a gradient where A < 0; finite and at least 1.

    Raises:
        EvidenceError: there is no dual clip (inf), so that the ratio has no largest value.

    >>> clipped_gradient_bias(0.02, 2.5, LOGIT_SCORE_NORM, 0.28, 3.0).round(4).item()
    0.2121
    """
    high = given("high", high, hint="the distance of the clip range from 1, such as 0.28")
    hint = "without a dual clip no ratio of a token with A < 0 is too large: give one, such as 3"
    ratio = np.maximum(1.0 + high, given("dual", dual, 1.0, _FINITE, hint))
    A, G = given("advantage", advantage, hint=_SIZE), given("score_norm", score_norm, hint=_SIZE)
    return product(given("gap", gap, hint=_GAP), A, ratio, G)


@theorem("conditional bound", assumes=("advantage", "score_norm", "token_level"), sharp=True)
def kl_penalty_bias(
    gap: ArrayLike,
    advantage: ArrayLike,
    score_norm: ArrayLike,
    beta: ArrayLike,
    clip: ArrayLike,
    tokens: ArrayLike = 1.0,
) -> Floats:
    """With a KL penalty in the reward: at most gap x (A + beta x clip x tokens) x score norm.

    The penalty of a token is beta times an estimate of KL(policy || reference) from its logprobs,
    such as their difference, which has no largest value unless it is clipped.  Advantages that are
    normalised in a group after the penalty keep the bound of the group, without a clip.

    Args:
        advantage: A, the largest |advantage| without the penalty, the baseline included.
        beta: the factor of the penalty.
        clip: the largest |estimate| of a token after its clip, nats; finite.
        tokens: how many penalties an advantage sums: 1 where each token has its own, and the
            length of a response where they are summed over the rest of it.

    Raises:
        EvidenceError: the penalty is not clipped (inf), so that it has no largest value.

    >>> kl_penalty_bias(0.02, 2.5, LOGIT_SCORE_NORM, 0.05, 10.0).round(4).item()
    0.0849
    """
    hint = "a penalty without a largest value has no bound: clip the KL estimate, such as at 10"
    clip = given("clip", clip, 0.0, _FINITE, hint)
    beta = given("beta", beta, 0.0, _FINITE, "the factor of the KL penalty, such as 0.001")
    tokens = given("tokens", tokens, 1.0, _FINITE, "the penalties of an advantage: 1 or more")
    A, G = given("advantage", advantage, hint=_SIZE), given("score_norm", score_norm, hint=_SIZE)
    return product(given("gap", gap, hint=_GAP), A + beta * clip * tokens, G)


@theorem("conditional bound", sharp=True)
def gradient_direction(bias: ArrayLike, norm: ArrayLike) -> Floats:
    """The cosine between a gradient and a biased one is at least sqrt(1 - (bias / norm)^2).

    Args:
        bias: an upper bound of the norm of their difference.
        norm: a lower bound of the norm of either, above 0: see `gradient_norm_at_least`.

    Returns:
        -1 where the bias exceeds the norm: every direction is possible.

    >>> gradient_direction([0.0, 0.06, 0.2], 0.1).round(4).tolist()
    [1.0, 0.8, -1.0]
    """
    bias = given("bias", bias, hint="the norm of a difference, such as `policy_gradient_bias`")
    hint = "a gradient of norm 0 has no direction: certify its norm from more responses"
    share = bias / above_zero("norm", norm, hint)
    inside = share <= 1.0
    share = np.where(inside, share, 0.0)
    return np.where(inside, np.sqrt((1.0 - share) * (1.0 + share)), -1.0)[()]


@theorem(
    "certificate",
    source="Pinelis 1994, Optimum bounds for martingales in Banach spaces, theorem 3.4",
    assumes=("order",),
)
def gradient_norm_at_least(
    norm: ArrayLike, largest: ArrayLike, n: ArrayLike, planned: ArrayLike, alpha: ArrayLike
) -> Floats:
    """The norm of a gradient is at least that of a mean of n samples less r / n, at all n <= N.

    r^2 = 2 L (N B^2 + 2 B r / 3) with L = log(2 / alpha): Bernstein's inequality, in any number of
    dimensions.  It holds with probability 1 - alpha for all n at once.

    Args:
        norm: of the mean of n gradients, each of which has the gradient as conditional mean.
        largest: B, the largest norm of one of them, such as a clip of gradients per sample.
        n: gradients so far; planned: N >= n, decided before the first.
        alpha: above 0, at most 1.

    >>> gradient_norm_at_least(0.5, 1.0, 2000, 2000, 0.05).round(4).item()
    0.438
    """
    hint = "a probability of error, such as 0.05"
    price = np.log(2.0 / above_zero("alpha", given("alpha", alpha, 0.0, 1.0, hint), hint))
    n = given("n", n, 1.0, _FINITE, "the number of gradients of the mean, 1 or more")
    hint = "at least n: decide it before the first gradient"
    planned = given("planned", planned, float(np.max(n)), _FINITE, hint)
    B = given("largest", largest, 0.0, _FINITE, "the largest norm of one gradient: clip it")
    r = B * (2.0 * price / 3.0 + np.sqrt((2.0 * price / 3.0) ** 2 + 2.0 * planned * price))
    return np.maximum(given("norm", norm, hint="that of the mean gradient") - r / n, 0.0)


@theorem(
    "conditional bound", assumes=("advantage", "score_norm", "token_level", "constant_divisor")
)
def loss_weights(loss: Loss, length_S: ArrayLike) -> Floats:
    """The weight of each token's gap in the bias, by the divisor of the loss.

    token_mean: 1 for each, then the mean over the tokens of all answers.  sequence_sum: 1,
    then the sum of an answer and the mean over answers.  sequence_mean (GRPO): 1/t at the
    t-th token, then as sequence_sum.  Times advantage x score norm, each bounds the bias.

    The divisor |y| of sequence_mean depends on the tokens drawn, so the mean gap of an
    answer is no bound.  Given the prefix, a token a at step t moves the gradient by
    (q psi - p)(a) A g E[1/|y| | prefix, a]; an answer that has a t-th token is at least t
    long, so the last factor is at most 1/t whatever follows.  Only sequence_mean does without
    a constant divisor.

    Args:
        loss: the contract's word.
        length_S: tokens of each answer, the end-of-text step included.

    Returns:
        [N], the tokens of one answer after those of another.

    Raises:
        EvidenceError: there is no such loss, or an answer has no whole number of tokens.

    >>> loss_weights("sequence_mean", [2, 3]).round(3).tolist()
    [1.0, 0.5, 1.0, 0.5, 0.333]
    """
    length_S = given("length", length_S, low=1.0, hint="drop answers without a token")
    if (length_S % 1).any():
        found = f"an answer has {length_S[length_S % 1 > 0][0]:g} tokens"
        raise EvidenceError(found, hint="give the whole number of its sampled tokens")
    if loss in ("token_mean", "sequence_sum"):
        return np.ones(int(length_S.sum()))
    if loss != "sequence_mean":
        raise EvidenceError(
            f"no loss is named {loss!r}", hint="known: token_mean, sequence_sum, sequence_mean"
        )
    steps = [np.arange(1.0, length + 1.0) for length in length_S.ravel()]
    return 1.0 / np.concatenate([np.zeros(0), *steps])


def clip_logs(low: float, high: float) -> tuple[float, float]:
    """The logs of 1 - low and 1 + high; a range below 0 does not bind."""
    low, high = float(given("low", low)), float(given("high", high))
    return (math.log1p(-low) if low < 1.0 else -math.inf), math.log1p(high)


@dataclass(frozen=True)
class RatioBudget:
    """The part of a clip range that the kernel gap leaves for the policy's own update.

    Args:
        used_up: fraction of log(1 + high) that the gap may take; used_down: of -log(1 - low).
        low, high: an update whose ratio is in [1 - low, 1 + high] is never clipped, whatever
            the kernels do within rho; negative where nothing is left.
    """

    used_up: Floats
    used_down: Floats
    low: Floats
    high: Floats


@theorem("conditional bound", assumes=("every_context", "one_ratio"), sharp=True)
def ratio_budget(rho: ArrayLike, low: float, high: float) -> RatioBudget:
    """A clip range is shared: what the kernel gap uses, no update of the policy can use.

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
    low_log, high_log = clip_logs(low, high)
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
def group_advantage_bound(group_size: int, std: Std = "sample") -> float:
    """The largest |advantage| normalised in a group of n: (n-1)/sqrt(n), or sqrt(n-1).

    Args:
        group_size: n >= 2 answers of one prompt.
        std: the divisor, n - 1 (sample) or n (population).

    Raises:
        EvidenceError: the group has fewer than two answers, or no whole number of them.

    >>> [round(group_advantage_bound(8, std), 3) for std in ("sample", "population")]
    [2.475, 2.646]
    """
    size = float(given("group_size", group_size, low=2.0, hint="one answer has no advantage"))
    if not size.is_integer():
        raise EvidenceError(f"a group has {size:g} answers", hint="give a whole number of them")
    n = int(size)
    return (n - 1) / math.sqrt(n) if std == "sample" else math.sqrt(n - 1)
