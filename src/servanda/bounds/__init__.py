# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import ASSUMPTIONS, Assumption
from servanda.bounds.drift import (
    greedy_flip_impossible,
    linf_with_repetition_penalty,
    osc_at_temperature,
    osc_from_linf,
    osc_from_rounding,
    rounding_eps,
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
from servanda.bounds.theorem import THEOREMS, Standing, Theorem, theorem
from servanda.bounds.truncation import KeptSets, truncation_sets, tv_truncated_interval
from servanda.bounds.weighting import PSI, Psi, weight_gap

__all__ = [
    "ASSUMPTIONS",
    "PSI",
    "THEOREMS",
    "Assumption",
    "KeptSets",
    "Psi",
    "Standing",
    "Theorem",
    "abs_log_ratio_from_osc",
    "chi2_from_osc",
    "greedy_flip_impossible",
    "hellinger2_from_osc",
    "kl_from_osc",
    "linf_with_repetition_penalty",
    "log_ratio_bounds",
    "osc_at_temperature",
    "osc_from_linf",
    "osc_from_rounding",
    "rounding_eps",
    "theorem",
    "truncation_sets",
    "tv_from_log_ratio",
    "tv_from_osc",
    "tv_from_osc_pmax",
    "tv_truncated_interval",
    "weight_gap",
]
