# Sequences: what the drift of single tokens does to whole answers and to their rewards.
#
# P and Q are the laws of whole answers under train and infer, W = P / Q = product of w, the
# end-of-text step included.  Everything sampled comes from infer, so prefixes are infer's
# own, and mass that infer cannot draw is counted: no support assumption.
#
# KL and chi^2 have no upper end that a sample could certify, so what is made of them is an
# estimate, however exact the inequality.

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.theorem import (
    Floats,
    given,
    lengths,
    log_ratios,
    over_sequences,
    theorem,
)

_FINITE = sys.float_info.max
_ROUNDING = 1e-9  # a bound this near to the end of its range, as a share of it, is at it
_erf = np.vectorize(math.erf, otypes=[np.float64])


def shortfall(log_weight: ArrayLike) -> Floats:
    """(1 - w)^+ of importance weights given by their logs; 1 at -inf, 0 at any w >= 1.

    >>> shortfall(np.log([0.25, 4.0])).tolist()
    [0.75, 0.0]
    """
    return 0.0 - np.expm1(np.minimum(np.asarray(log_weight, dtype=np.float64), 0.0))


@dataclass(frozen=True)
class SequenceEstimators:
    """Three values of each sampled sequence, [S]: exact <= coupling <= total.

    Args:
        exact: (1 - W)^+, in [0, 1]; its mean is TV(P, Q).
        coupling: 1 - product of min(1, w), in [0, 1]: how often two chains that are coupled
            token by token part.
        total: sum of (1 - w)^+; its mean is E_infer of the sum of each step's TV.
    """

    exact: Floats
    coupling: Floats
    total: Floats


@theorem("certificate", assumes=("sampler", "same_tokens"), sharp=True)
def sequence_estimators(log_ratio_N: ArrayLike, length_S: ArrayLike) -> SequenceEstimators:
    """E_infer (1 - W)^+ is TV(P, Q), at most 1 - E prod min(1, w), at most E sum (1 - w)^+.

    Args:
        log_ratio_N: log p - log q of the sampled tokens of all sequences, one sequence after
            another, [N], nats; -inf where train gives no mass.
        length_S: tokens of each sequence, [S].

    Raises:
        EvidenceError: a log ratio is NaN or +inf, or the lengths do not fit.

    >>> sequence_estimators(np.log([0.5, 2.0, 0.5]), [2, 1]).coupling.tolist()
    [0.5, 0.5]
    """
    log_ratio_N = log_ratios(log_ratio_N)
    length_S = lengths(length_S, len(log_ratio_N))
    return SequenceEstimators(
        exact=shortfall(over_sequences(log_ratio_N, length_S)),
        coupling=shortfall(over_sequences(np.minimum(log_ratio_N, 0.0), length_S)),
        total=over_sequences(shortfall(log_ratio_N), length_S),
    )


def _range(low: float, high: float) -> float:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise EvidenceError(
            f"the rewards' range [{low:g}, {high:g}] is empty or endless",
            hint="give the smallest and the largest reward, such as low=0, high=1",
        )
    return high - low


@theorem("certificate", assumes=("reward_range", "same_reward"), sharp=True)
def reward_drift_from_tv(tv: ArrayLike, low: float, high: float) -> Floats:
    """|E_P R - E_Q R| is at most (high - low) TV(P, Q), for any reward in [low, high].

    Args:
        tv: of whole answers, or an upper bound of it; more than 1 says no more than 1.
        low, high: smallest and largest reward.

    >>> float(reward_drift_from_tv(0.25, -1.0, 1.0))
    0.5
    """
    return np.minimum(given("tv", tv), 1.0) * _range(low, high)


@theorem(
    "certificate",
    source="hybrid argument, prefix by prefix",
    assumes=("sampler", "same_tokens"),
    sharp=True,
)
def sequence_tv_from_token_tv(mean_tv: ArrayLike, tokens: ArrayLike) -> Floats:
    """TV(P, Q) is at most the response length times the mean TV at the infer kernel's prefixes.

    Args:
        mean_tv: mean over tokens of the TV of each step, prefixes drawn by infer.
        tokens: expected number of tokens of infer's answers, or the largest; >= 1.

    >>> float(sequence_tv_from_token_tv(0.001, 128))
    0.128
    """
    tokens = given("tokens", tokens, 1.0, _FINITE)
    return np.minimum(given("mean_tv", mean_tv, high=1.0) * tokens, 1.0)


@theorem("certificate", assumes=("sampler", "same_tokens", "same_environment"), sharp=True)
def conversation_tv_from_token_tv(mean_tv: ArrayLike, tokens: ArrayLike) -> Floats:
    """TV of whole conversations is at most the sampled tokens of all turns times their mean TV.

    Between turns a tool or a user answers.  Where both kernels meet the same law of its answers,
    their factors cancel in W, and the estimators of the sampled tokens alone are those of whole
    conversations: E_infer (1 - W)^+ is their TV, and every bound on rewards follows.

    Args:
        mean_tv: mean over sampled tokens of the TV of each step, prefixes drawn by infer and its
            environment.
        tokens: expected number of sampled tokens of infer's conversations, or the largest; >= 1.

    >>> float(conversation_tv_from_token_tv(0.001, 3 * 64))
    0.192
    """
    hint = "count the sampled tokens of all turns; a conversation has at least one"
    tokens = given("tokens", tokens, 1.0, _FINITE, hint)
    hint = "a total variation is in [0, 1]; give an upper bound of the mean"
    return np.minimum(given("mean_tv", mean_tv, high=1.0, hint=hint) * tokens, 1.0)


@theorem("conditional bound", assumes=("every_context", "same_filters"))
def sequence_tv_from_osc(osc: ArrayLike, tokens: ArrayLike) -> Floats:
    """TV(P, Q) is at most sqrt(1 - sech(osc / 4)^(2 tokens)) if every context drifts by osc.

    The affinities of the steps multiply.  Better than the sum and the product of the steps'
    TV, than Pinsker and Bretagnolle-Huber, and within sqrt(pi / 2) of the worst case, which it
    is for one token.

    Args:
        osc: largest max - min of the drift of logits at any context, nats.
        tokens: largest number of tokens of an answer; >= 1.

    >>> round(float(sequence_tv_from_osc(0.125, 1000)), 2)
    0.79
    """
    drift = np.tanh(given("osc", osc) / 4.0)
    tokens = given("tokens", tokens, 1.0, _FINITE)
    with np.errstate(divide="ignore"):  # endless drift: sech is 0
        return np.sqrt(-np.expm1(tokens * np.log1p(-(drift**2))))


@theorem(
    "conditional bound", assumes=("every_context", "same_filters", "reward_range", "same_reward")
)
def osc_for_reward_drift(
    drift: ArrayLike, tokens: ArrayLike, low: float = 0.0, high: float = 1.0
) -> Floats:
    """If every context drifts by at most this osc, the reward drifts by at most the given bound.

    The inverse of `sequence_tv_from_osc` and `reward_drift_from_tv`; inf where the given
    drift is the whole range.

    Args:
        drift: of the expected reward, in its units, >= 0.
        tokens: largest number of tokens of an answer; >= 1.

    >>> osc_for_reward_drift(0.05, [1, 128, 1024, 8192]).round(4).tolist()
    [0.2002, 0.0177, 0.0063, 0.0022]
    """
    share = given("drift", drift) / _range(low, high)
    tokens = given("tokens", tokens, 1.0, _FINITE)
    with np.errstate(divide="ignore"):
        step = np.sqrt(-np.expm1(np.log1p(-(np.minimum(share, 1.0) ** 2)) / tokens))
        return 4.0 * np.arctanh(step)


@theorem("diagnostic", source="TV of normal log W of mean -KL, variance 2 KL", assumes=("normal",))
def sequence_tv_gaussian(kl: ArrayLike) -> Floats:
    """TV(P, Q) is about erf(sqrt(KL) / 2), the limit of many small steps; not a bound.

    Args:
        kl: of whole answers, nats.

    >>> round(float(sequence_tv_gaussian(8192 * 0.02**2 / 2)), 3)
    0.635
    """
    return _erf(np.sqrt(given("kl", kl)) / 2.0)[()]


def is_vacuous(bound: float, most: float) -> bool:
    """Whether a bound says nothing that the largest possible value did not, but for rounding."""
    return not bound < most * (1 - _ROUNDING)
