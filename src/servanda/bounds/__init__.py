# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import ASSUMPTIONS, Assumption
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
from servanda.bounds.weighting import PSI, Psi, weight_gap

__all__ = [
    "ASSUMPTIONS",
    "PSI",
    "THEOREMS",
    "Assumption",
    "Psi",
    "SequenceEstimators",
    "Standing",
    "Theorem",
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
    "theorem",
    "tv_from_kl",
    "weight_gap",
]
