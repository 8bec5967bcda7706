# Divergences between two kernels, one file per family; the registry is filled on import.

# these modules register their metrics
from servanda.theory.divergence import (  # noqa: F401
    chi2,
    contribution,
    entropy,
    flip,
    hellinger,
    kl,
    le_cam,
    osc,
    routes,
    topk,
    tv,
)
