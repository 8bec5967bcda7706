# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import (
    ASSUMPTIONS,
    Assumption,
)
from servanda.bounds.drift import (
    greedy_flip_impossible,
    linf_with_repetition_penalty,
    osc_at_temperature,
    osc_from_linf,
    osc_from_rounding,
    rounding_eps,
)
from servanda.bounds.exceedance import (
    tv_from_exceedance,
)
from servanda.bounds.gaps import (
    missing_mass,
    tis_gap_from_chi2,
    weight_gap_from_log_ratio,
    weight_gap_from_tv,
)
from servanda.bounds.gradient import (
    LOGIT_SCORE_NORM,
    Loss,
    RatioBudget,
    Std,
    group_advantage_bound,
    loss_weights,
    policy_gradient_bias,
    ppo_clip_bias,
    ratio_budget,
    score_norm2_logits,
    sum_p2_from_top_k,
)
from servanda.bounds.logits import (
    abs_log_ratio_from_osc,
    chi2_from_osc,
    hellinger2_from_osc,
    kl_from_osc,
    log_ratio_bounds,
    tv_from_log_ratio,
    tv_from_osc,
    tv_from_osc_pmax,
)
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
from servanda.bounds.surrogate import (
    surrogate_error,
    surrogate_error_from_tv,
)
from servanda.bounds.theorem import (
    THEOREMS,
    Standing,
    Theorem,
    theorem,
)
from servanda.bounds.trajectory import (
    grpo_bias,
    rloo_bias,
    sequence_mis_bias,
    sequence_naive_bias,
    sequence_tis_bias,
    token_is_trajectory_bias,
)
from servanda.bounds.truncation import (
    KeptSets,
    truncation_sets,
    tv_truncated_interval,
)
from servanda.bounds.weighting import (
    PSI,
    Psi,
    weight_gap,
)

__all__ = [
    "ASSUMPTIONS",
    "LOGGED",
    "LOGIT_SCORE_NORM",
    "PSI",
    "THEOREMS",
    "Assumption",
    "KeptSets",
    "Logged",
    "Loss",
    "Psi",
    "RatioBudget",
    "SequenceEstimators",
    "Standing",
    "Std",
    "Theorem",
    "abs_log_ratio_from_osc",
    "chi2_from_osc",
    "chi2_from_second_moment",
    "greedy_flip_impossible",
    "group_advantage_bound",
    "grpo_bias",
    "hellinger2_from_osc",
    "is_vacuous",
    "kl_from_osc",
    "linf_with_repetition_penalty",
    "log_ratio_bounds",
    "loss_weights",
    "missing_mass",
    "osc_at_temperature",
    "osc_for_reward_drift",
    "osc_from_linf",
    "osc_from_rounding",
    "policy_gradient_bias",
    "ppo_clip_bias",
    "ratio_budget",
    "reward_drift_from_chi2",
    "reward_drift_from_tv",
    "reward_interval",
    "rloo_bias",
    "rounding_eps",
    "score_norm2_logits",
    "sequence_estimators",
    "sequence_mis_bias",
    "sequence_naive_bias",
    "sequence_tis_bias",
    "sequence_tv_from_osc",
    "sequence_tv_from_token_tv",
    "sequence_tv_gaussian",
    "shortfall",
    "sum_p2_from_top_k",
    "surrogate_error",
    "surrogate_error_from_tv",
    "theorem",
    "tis_gap_from_chi2",
    "token_is_trajectory_bias",
    "truncation_sets",
    "tv_at_least_probs_diff",
    "tv_from_exceedance",
    "tv_from_kl",
    "tv_from_log_ratio",
    "tv_from_mean_abs_log_ratio",
    "tv_from_mult_prob_error",
    "tv_from_osc",
    "tv_from_osc_pmax",
    "tv_interval_full",
    "tv_rao_blackwell",
    "tv_truncated_interval",
    "weight_gap",
    "weight_gap_from_log_ratio",
    "weight_gap_from_tv",
]
