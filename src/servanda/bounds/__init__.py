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
    "Standing",
    "Std",
    "Theorem",
    "group_advantage_bound",
    "grpo_bias",
    "loss_weights",
    "missing_mass",
    "policy_gradient_bias",
    "ppo_clip_bias",
    "ratio_budget",
    "rloo_bias",
    "score_norm2_logits",
    "sequence_mis_bias",
    "sequence_naive_bias",
    "sequence_tis_bias",
    "sum_p2_from_top_k",
    "theorem",
    "tis_gap_from_chi2",
    "token_is_trajectory_bias",
    "weight_gap",
    "weight_gap_from_log_ratio",
    "weight_gap_from_tv",
]
