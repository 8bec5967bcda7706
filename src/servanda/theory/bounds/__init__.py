# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `python -m benchmarks.theory` checks each by enumeration
# and an adversarial search.

# these modules register their theorems
from servanda.theory.bounds import (  # noqa: F401
    drift,
    gradient,
    importance_weights,
    sequence,
    third_kernel,
)
