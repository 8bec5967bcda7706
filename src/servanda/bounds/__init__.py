# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import ASSUMPTIONS, Assumption
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
from servanda.bounds.theorem import THEOREMS, Standing, Theorem, theorem
from servanda.bounds.trajectory import (
    grpo_bias,
    rloo_bias,
    sequence_mis_bias,
    sequence_naive_bias,
    sequence_tis_bias,
    token_is_trajectory_bias,
)
from servanda.bounds.weighting import PSI, Psi, weight_gap

__all__ = [
    "ASSUMPTIONS",
    "LOGIT_SCORE_NORM",
    "PSI",
    "THEOREMS",
    "Assumption",
    "Loss",
    "Psi",
    "RatioBudget",
    "SequenceEstimators",
    "Standing",
    "Std",
    "Theorem",
    "group_advantage_bound",
    "grpo_bias",
    "is_vacuous",
    "loss_weights",
    "missing_mass",
    "osc_for_reward_drift",
    "policy_gradient_bias",
    "ppo_clip_bias",
    "ratio_budget",
    "reward_drift_from_chi2",
    "reward_drift_from_tv",
    "reward_interval",
    "rloo_bias",
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
    "theorem",
    "tis_gap_from_chi2",
    "token_is_trajectory_bias",
    "tv_from_kl",
    "weight_gap",
    "weight_gap_from_log_ratio",
    "weight_gap_from_tv",
]
