# Divergences between two kernels, one file a quantity; the registry is filled on import.

from servanda.theory.divergence import (
    chi2,
    contribution,
    entropy,
    flip,
    hellinger,
    js,
    k1,
    k2,
    k3,
    kl,
    kl_reverse,
    le_cam,
    linf,
    log_ratio,
    osc,
    topk,
    tv,
)
from servanda.theory.divergence.base import DIVERGENCES, Divergence, LogitRows, Span, exact, sampled
from servanda.theory.divergence.calibration import calibration, calibration_error
from servanda.theory.divergence.topk import interval
from servanda.theory.divergence.topk_rows import TopK, TopRows

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "LogitRows",
    "Span",
    "TopK",
    "TopRows",
    "calibration",
    "calibration_error",
    "chi2",
    "contribution",
    "entropy",
    "exact",
    "flip",
    "hellinger",
    "interval",
    "js",
    "k1",
    "k2",
    "k3",
    "kl",
    "kl_reverse",
    "le_cam",
    "linf",
    "log_ratio",
    "osc",
    "sampled",
    "topk",
    "tv",
]
