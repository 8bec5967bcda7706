# Whole answers and their rewards: theorems that no verdict uses.

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.theorem import Floats, given, log_ratios, theorem

_FINITE = sys.float_info.max


@theorem("estimate", source="Cauchy-Schwarz inequality", assumes=("same_reward",), sharp=True)
def reward_drift_from_chi2(chi2: ArrayLike, std: ArrayLike) -> Floats:
    """|E_P R - E_Q R| is at most sqrt(chi^2(P || Q)) times the standard deviation of R under Q.

    Args:
        chi2: of whole answers; inf where infer lacks support, and then nothing is said.
        std: standard deviation of the reward of infer's answers, in its units.

    >>> float(reward_drift_from_chi2(0.04, 0.5))
    0.1
    """
    chi2 = given("chi2", chi2)
    std = given("std", std, high=_FINITE)
    endless = np.isposinf(chi2)  # a reward that is constant on infer's answers may vary off them
    return np.where(endless, np.inf, np.sqrt(np.where(endless, 0.0, chi2)) * std)[()]


@theorem(
    "certificate", assumes=("sampler", "same_tokens", "reward_range", "same_reward"), sharp=True
)
def reward_interval(
    log_weight_S: ArrayLike, reward_S: ArrayLike, cap: float = 1.0
) -> tuple[Floats, Floats]:
    """E_P R - E_Q R is between the means of -(1 - W^C) R and (1 - W^C)(1 - R), W^C = min(W, C).

    The interval is as wide as 1 - E_infer min(W, C): the mass that infer cannot draw, and
    what the cap cuts off.

    Args:
        log_weight_S: log W of each sampled sequence, [S], nats; -inf where P gives no mass.
        reward_S: in [0, 1], [S].
        cap: C >= 1, chosen before the outcomes.

    Returns:
        (low_S in [-1, C - 1], high_S in [1 - C, 1]); what a mean certifies is its end.

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
    "estimate",
    source="Pinsker; J. Bretagnolle and C. Huber, Estimation des densites, 1979",
    sharp=True,
)
def tv_from_kl(kl: ArrayLike) -> Floats:
    """TV is at most sqrt(KL / 2) and sqrt(1 - exp(-KL)), for tokens and for whole responses.

    Both are concave: a mean of KL over contexts bounds the mean of their TV.

    Args:
        kl: either direction, nats.  Of whole answers, KL(Q || P) is the expected sum of the
            KL of infer's tokens.

    >>> float(tv_from_kl(0.02))
    0.1
    """
    kl = given("kl", kl)
    return np.minimum(np.sqrt(kl / 2.0), np.sqrt(-np.expm1(-kl)))
