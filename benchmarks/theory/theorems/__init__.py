# Theorems that no verdict uses: stated, proved and attacked as those of servanda.theory.bounds.

# these register their theorems
from benchmarks.theory.theorems import (  # noqa: F401
    drift,
    gradient,
    logits,
    partial_observation,
    sequence,
    surrogate,
    trajectory,
    truncation,
    updates,
    weighting_gap,
)
