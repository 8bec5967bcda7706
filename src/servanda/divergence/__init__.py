# Divergences between two kernels, one file a quantity; the registry is filled on import.

from servanda.divergence import flip, k3, log_ratio, osc, tv
from servanda.divergence.base import DIVERGENCES, Divergence, LogitRows, exact, sampled

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "LogitRows",
    "exact",
    "flip",
    "k3",
    "log_ratio",
    "osc",
    "sampled",
    "tv",
]
