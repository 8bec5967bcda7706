# Sequences: the effect of the drift of single tokens on whole responses and their rewards.
#
# P and Q are the distributions of whole responses under train and infer, W = P / Q = product of w,
# including the end-of-text step.  Samples and prefixes come from infer, and mass that infer cannot
# sample is counted: no support assumption.
#
# KL and chi^2 have no upper bound that a sample could certify, so results from them are estimates,
# even if the inequality is exact.

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.domain import Floats, given, lengths, log_ratios, over_sequences
from servanda.theory.bounds.theorem import theorem

_FINITE = sys.float_info.max
_ROUNDING = 1e-9  # relative distance within which a bound equals the end of its range
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
        coupling: 1 - product of min(1, w), in [0, 1]: the probability that two chains coupled token
            by token separate.
        total: sum of (1 - w)^+; its mean is E_infer of the sum of each step's TV.
    """

    exact: Floats
    coupling: Floats
    total: Floats


@theorem("certificate", assumes=("sampler", "same_tokens"), sharp=True)
def sequence_estimators(log_ratio_N: ArrayLike, length_S: ArrayLike) -> SequenceEstimators:
    """E_infer (1 - W)^+ is TV(P, Q), at most 1 - E prod min(1, w), at most E sum (1 - w)^+.

    Args:
        log_ratio_N: log p - log q of the sampled tokens of all sequences, concatenated, [N], nats;
            -inf without mass under train.
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
    """|E_P R - E_Q R| is at most (high - low) TV(P, Q), for any reward.

    Args:
        tv: TV of whole responses, or an upper bound; values above 1 count as 1.
        low, high: smallest and largest reward.

    >>> float(reward_drift_from_tv(0.25, -1.0, 1.0))
    0.5
    """
    return np.minimum(given("tv", tv), 1.0) * _range(low, high)


@theorem("estimate", source="Cauchy-Schwarz inequality", assumes=("same_reward",), sharp=True)
def reward_drift_from_chi2(chi2: ArrayLike, std: ArrayLike) -> Floats:
    """|E_P R - E_Q R| is at most sqrt(chi^2(P || Q)) times the std of R under infer.

    Args:
        chi2: of whole responses; inf if infer lacks support: no bound.
        std: standard deviation of the reward of infer's responses, in its units.

    >>> float(reward_drift_from_chi2(0.04, 0.5))
    0.1
    """
    chi2 = given("chi2", chi2)
    std = given("std", std, high=_FINITE)
    endless = np.isposinf(chi2)  # a reward that is constant on infer's responses may vary elsewhere
    return np.where(endless, np.inf, np.sqrt(np.where(endless, 0.0, chi2)) * std)[()]


@theorem(
    "certificate", assumes=("sampler", "same_tokens", "reward_range", "same_reward"), sharp=True
)
def reward_interval(
    log_weight_S: ArrayLike, reward_S: ArrayLike, cap: float = 1.0
) -> tuple[Floats, Floats]:
    """E_P R - E_Q R lies between the means of -(1 - W^C) R and (1 - W^C)(1 - R), W^C = min(W, C).

    The width of the interval is 1 - E_infer min(W, C): the mass that infer cannot sample, and the
    mass that the cap removes.

    Args:
        log_weight_S: log W of each sampled sequence, [S], nats; -inf without mass under P.
        reward_S: in [0, 1], [S].
        cap: C >= 1, chosen before the outcomes.

    Returns:
        (low_S in [-1, C - 1], high_S in [1 - C, 1]); each mean certifies its end of the interval.

    Raises:
        EvidenceError: a weight is NaN or +inf, a reward outside [0, 1] or missing, cap below 1.

    >>> low, high = reward_interval(np.log([0.5, 2.0]), [1.0, 0.0])
    >>> low.tolist(), high.tolist()
    ([-0.5, 0.0], [0.0, 0.0])
    """
    hint = "map the rewards to [0, 1] by the declared range"
    reward_S = given("reward", reward_S, high=1.0, hint=hint)
    cap = float(given("cap", cap, 1.0, _FINITE))
    log_weight_S = log_ratios(log_weight_S)
    if reward_S.shape != log_weight_S.shape:
        raise EvidenceError(
            f"{reward_S.size} rewards for {log_weight_S.size} sequences",
            hint="give each sampled sequence its own reward",
        )
    left_S = 0.0 - np.expm1(np.minimum(log_weight_S, math.log(cap)))
    return 0.0 - left_S * reward_S, left_S * (1.0 - reward_S)


@theorem(
    "certificate",
    source="hybrid argument, prefix by prefix",
    assumes=("sampler", "same_tokens"),
    sharp=True,
)
def sequence_tv_from_token_tv(mean_tv: ArrayLike, tokens: ArrayLike) -> Floats:
    """TV(P, Q) is at most the tokens of a response times the mean TV over infer's prefixes.

    Args:
        mean_tv: mean over tokens of the TV of each step, with prefixes sampled by infer.
        tokens: expected number of tokens of infer's responses, or the largest; >= 1.

    >>> float(sequence_tv_from_token_tv(0.001, 128))
    0.128
    """
    tokens = given("tokens", tokens, 1.0, _FINITE)
    return np.minimum(given("mean_tv", mean_tv, high=1.0) * tokens, 1.0)


@theorem(
    "estimate",
    source="Pinsker; J. Bretagnolle and C. Huber, Estimation des densites, 1979",
    sharp=True,
)
def tv_from_kl(kl: ArrayLike) -> Floats:
    """TV is at most sqrt(KL / 2) and sqrt(1 - exp(-KL)), for tokens and for whole responses.

    Both are concave: a mean of KL over contexts bounds the mean of their TV.

    Args:
        kl: either direction, nats.  For whole responses, KL(Q || P) is the expected sum of the
            KL of infer's tokens.

    >>> float(tv_from_kl(0.02))
    0.1
    """
    kl = given("kl", kl)
    return np.minimum(np.sqrt(kl / 2.0), np.sqrt(-np.expm1(-kl)))


@theorem("conditional bound", assumes=("every_context", "same_filters"))
def sequence_tv_from_osc(osc: ArrayLike, tokens: ArrayLike) -> Floats:
    """TV(P, Q) is at most sqrt(1 - sech(osc / 4)^(2 tokens)) if every context drifts by osc.

    The affinities of the steps multiply.  Tighter than the sum and the product of the steps' TV,
    than Pinsker and Bretagnolle-Huber, and within sqrt(pi / 2) of the worst case, which it attains
    for one token.

    Args:
        osc: largest max - min of the drift of logits at any context, nats.
        tokens: largest number of tokens of a response; >= 1.

    >>> round(float(sequence_tv_from_osc(0.125, 1000)), 2)
    0.79
    """
    drift = np.tanh(given("osc", osc) / 4.0)
    tokens = given("tokens", tokens, 1.0, _FINITE)
    with np.errstate(divide="ignore"):  # infinite drift: sech is 0
        return np.sqrt(-np.expm1(tokens * np.log1p(-(drift**2))))


@theorem(
    "conditional bound", assumes=("every_context", "same_filters", "reward_range", "same_reward")
)
def osc_for_reward_drift(
    drift: ArrayLike, tokens: ArrayLike, low: float = 0.0, high: float = 1.0
) -> Floats:
    """If every context drifts by at most this, the reward drifts by at most the given value.

    The inverse of `sequence_tv_from_osc` and `reward_drift_from_tv`; inf if the given drift is the
    whole range.

    Args:
        drift: bound on the drift of the expected reward, in its units, >= 0.
        tokens: largest number of tokens of a response; >= 1.

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
    """TV(P, Q) is about erf(sqrt(KL) / 2): no bound, but the limit of many small steps.

    Args:
        kl: of whole responses, nats.

    >>> round(float(sequence_tv_gaussian(8192 * 0.02**2 / 2)), 3)
    0.635
    """
    return _erf(np.sqrt(given("kl", kl)) / 2.0)[()]


def is_vacuous(bound: float, most: float) -> bool:
    """Whether a bound is no smaller than the largest possible value, up to rounding."""
    return not bound < most * (1 - _ROUNDING)
