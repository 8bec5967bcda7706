# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import (
    ASSUMPTIONS,
    Assumption,
)
from servanda.bounds.logits import (
    abs_log_ratio_from_osc,
    chi2_from_osc,
    greedy_flip_impossible,
    hellinger2_from_osc,
    kl_from_osc,
    linf_with_repetition_penalty,
    log_ratio_bounds,
    osc_at_temperature,
    osc_from_linf,
    osc_from_rounding,
    rounding_eps,
    tv_from_log_ratio,
    tv_from_osc,
    tv_from_osc_pmax,
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
from servanda.bounds.theorem import (
    THEOREMS,
    Standing,
    Theorem,
    theorem,
)
from servanda.bounds.weighting import (
    PSI,
    Psi,
    weight_gap,
)

__all__ = [
    "ASSUMPTIONS",
    "PSI",
    "THEOREMS",
    "Assumption",
    "Psi",
    "SequenceEstimators",
    "Standing",
    "Theorem",
    "abs_log_ratio_from_osc",
    "chi2_from_osc",
    "greedy_flip_impossible",
    "hellinger2_from_osc",
    "is_vacuous",
    "kl_from_osc",
    "linf_with_repetition_penalty",
    "log_ratio_bounds",
    "osc_at_temperature",
    "osc_for_reward_drift",
    "osc_from_linf",
    "osc_from_rounding",
    "reward_drift_from_chi2",
    "reward_drift_from_tv",
    "reward_interval",
    "rounding_eps",
    "sequence_estimators",
    "sequence_tv_from_osc",
    "sequence_tv_from_token_tv",
    "sequence_tv_gaussian",
    "shortfall",
    "theorem",
    "tv_from_kl",
    "tv_from_log_ratio",
    "tv_from_osc",
    "tv_from_osc_pmax",
    "weight_gap",
]
