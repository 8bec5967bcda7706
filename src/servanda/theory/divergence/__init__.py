# Divergences between two kernels, one file a quantity; the registry is filled on import.

# these register their metrics
from servanda.theory.divergence import (  # noqa: F401
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
