# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import ASSUMPTIONS, Assumption
from servanda.bounds.partial import (
    LOGGED,
    Logged,
    chi2_from_second_moment,
    tv_at_least_probs_diff,
    tv_from_mean_abs_log_ratio,
    tv_from_mult_prob_error,
    tv_interval_full,
    tv_rao_blackwell,
)
from servanda.bounds.sequence import (
    SequenceEstimators,
    is_vacuous,
    osc_for_reward_drift,
    reward_drift_from_chi2,
    reward_drift_from_tv,
    reward_interval,
    sequence_estimators,
    sequence_tv_from_osc,
    sequence_tv_from_token_tv,
    sequence_tv_gaussian,
    shortfall,
    tv_from_kl,
)
from servanda.bounds.surrogate import surrogate_error, surrogate_error_from_tv
from servanda.bounds.theorem import THEOREMS, Standing, Theorem, theorem
from servanda.bounds.weighting import PSI, Psi, weight_gap

__all__ = [
    "ASSUMPTIONS",
    "LOGGED",
    "PSI",
    "THEOREMS",
    "Assumption",
    "Logged",
    "Psi",
    "SequenceEstimators",
    "Standing",
    "Theorem",
    "chi2_from_second_moment",
    "is_vacuous",
    "osc_for_reward_drift",
    "reward_drift_from_chi2",
    "reward_drift_from_tv",
    "reward_interval",
    "sequence_estimators",
    "sequence_tv_from_osc",
    "sequence_tv_from_token_tv",
    "sequence_tv_gaussian",
    "shortfall",
    "surrogate_error",
    "surrogate_error_from_tv",
    "theorem",
    "tv_at_least_probs_diff",
    "tv_from_kl",
    "tv_from_mean_abs_log_ratio",
    "tv_from_mult_prob_error",
    "tv_interval_full",
    "tv_rao_blackwell",
    "weight_gap",
]
