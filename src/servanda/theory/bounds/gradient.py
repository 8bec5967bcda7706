# Policy gradients, token by token: what a gap of weights can bend, and what a clip uses up.
#
# At a context c the trainer wants E_p[A g], g = grad log p of the token, and computes
# E_q[psi(w) A g].  The difference is at most advantage x score norm x D_psi, whatever the
# advantages are: D_psi = sum |p - q psi(w)| (see importance_weights.py).

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.theorem import Floats, given, product, theorem

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
        raise EvidenceError(f"an answer has {length_S[length_S % 1 > 0][0]:g} tokens")
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
