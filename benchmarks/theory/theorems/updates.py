# What comes on top of a kernel gap: clipped updates, a penalty on the KL, an environment, another
# routing or the age of the weights.  Theorems that no verdict uses.

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.gradient import policy_gradient_bias
from servanda.theory.bounds.theorem import Floats, given, lengths, over_sequences, theorem

_OF_TOKENS = ("score_norm", "token_level")


@theorem("conditional bound", assumes=("advantage", "own_ratio", *_OF_TOKENS), sharp=True)
def clipped_update_bias(
    gap: ArrayLike, advantage: ArrayLike, score_norm: ArrayLike, high: float, dual: float
) -> Floats:
    """At any epoch, PPO's clip with corrected weights is biased by gap x H x score norm at most.

    In the decoupled form the clipped ratio r is new policy over old policy of the train kernel,
    and psi of the old policies weighs the token.  What the clip leaves of a token's gradient is
    h g, with |h| at most H = advantage x max(1 + high, dual): r A where neither clip binds, else
    0.  So E_infer psi h g is from E_train h g by the gap of the old policies times H G, whatever
    the update has done.

    Args:
        gap: D_psi of the old policies, or its mean: see `weight_gap`.
        high: the upper clip range, 1 + high.
        dual: the clip of r where the advantage is negative, above 1.  Without one r has no largest
            value there, and no bound exists.

    Raises:
        EvidenceError: a number is negative, or `dual` is not a finite number above 1.

    >>> clipped_update_bias(0.02, 2.5, 1.0, 0.28, 3.0).round(4).item()
    0.15
    """
    hint = "give the dual clip of the loss, such as 3: without it no bound exists"
    dual = float(given("dual", dual, 1.0, sys.float_info.max, hint))
    largest = given("advantage", advantage) * max(1.0 + float(given("high", high)), dual)
    return policy_gradient_bias(gap, largest, score_norm)


@theorem("conditional bound", assumes=("advantage", *_OF_TOKENS), sharp=True)
def penalised_reward_bias(
    gap: ArrayLike, advantage: ArrayLike, score_norm: ArrayLike, beta: float, clip: float
) -> Floats:
    """With beta times a cut log ratio in the reward, at most gap x (A + beta clip) x score norm.

    The reward of a token is A - beta k, with k = log(policy / reference) cut to [-clip, clip]: a
    log ratio that is not cut has no largest value, and no bound exists.

    Args:
        beta: weight of the penalty, >= 0; clip: largest |k|, nats, finite.

    Raises:
        EvidenceError: a number is negative, or the log ratio is not cut.

    >>> penalised_reward_bias(0.02, 1.0, 1.0, beta=0.1, clip=10.0).round(4).item()
    0.04
    """
    hint = "cut the log ratio to the reference, such as at 10 nats: without it no bound exists"
    clip = float(given("clip", clip, 0.0, sys.float_info.max, hint))
    largest = given("advantage", advantage) + float(given("beta", beta)) * clip
    return policy_gradient_bias(gap, largest, score_norm)


@theorem("certificate", assumes=("sampler", "same_tokens", "same_environment"), sharp=True)
def episode_tv(tv_N: ArrayLike, length_S: ArrayLike) -> Floats:
    """TV of episodes with an environment is at most the mean sum of TV at the model's tokens.

    The environment answers each action by one law of the history, whichever kernel acts: its
    probabilities cancel in the weight of an episode, and its tokens add nothing.

    Args:
        tv_N: TV of the next token at the model's own tokens alone, one episode after another.
        length_S: the model's tokens of each episode, as infer drew it.

    Returns:
        Of each episode the sum; their mean over episodes is the bound.

    Raises:
        EvidenceError: a TV is outside [0, 1], or the lengths do not fit.

    >>> episode_tv([0.1, 0.2, 0.05], [2, 1]).round(3).tolist()
    [0.3, 0.05]
    """
    tv_N = given("tv", tv_N, high=1.0)
    return over_sequences(tv_N, lengths(length_S, len(tv_N)))


@theorem("certificate", sharp=True)
def tv_through_a_third(one: ArrayLike, other: ArrayLike) -> tuple[Floats, Floats]:
    """The TV of two kernels is between the difference and the sum of their TV to a third one.

    Engine and trainer through a trainer that replays the engine's routes: own routes cost at most
    TV(own, replayed) more.  Or through the old weights: what staleness adds is at most the TV of
    the train kernel's two versions.

    Returns:
        (low, high), of their common shape, in [0, 1].

    >>> low, high = tv_through_a_third(0.02, 0.05)
    >>> low.round(3).item(), high.round(3).item()
    (0.03, 0.07)
    """
    one, other = given("one", one, high=1.0), given("other", other, high=1.0)
    return np.abs(one - other), np.minimum(one + other, 1.0)


@theorem("certificate", sharp=True)
def gradient_cosine(bias: ArrayLike, norm: ArrayLike) -> Floats:
    """The cosine of a biased gradient and the exact one is at least sqrt(1 - (bias / norm)^2).

    Args:
        bias: largest norm of their difference; norm: of the exact gradient, or a lower confidence
            bound of it, in the same unit.

    Raises:
        EvidenceError: a bias of `norm` or more: then any direction is possible.

    >>> gradient_cosine(0.6, 1.0).round(3).item()
    0.8
    """
    bias, norm = np.broadcast_arrays(given("bias", bias), given("norm", norm))
    if (bias >= norm).any():
        at = bias >= norm
        raise EvidenceError(
            f"a bias of {bias[at].flat[0]:g} and a gradient of norm {norm[at].flat[0]:g}: any "
            "direction is possible",
            hint="a smaller gap, or more rows for the lower bound of the norm",
        )
    return np.sqrt(1.0 - (bias / norm) ** 2)
