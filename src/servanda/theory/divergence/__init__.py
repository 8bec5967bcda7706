# Divergences between two kernels; the registry is filled on import.

# these modules register their metrics
from servanda.theory.divergence import (  # noqa: F401
    distances,
    kl,
    routes,
    row_gaps,
    topk,
)
