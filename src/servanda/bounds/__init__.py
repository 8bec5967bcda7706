# Bounds: from drift of logits to sequences, rewards and policy gradients.
#
# One theorem, one function, one source; `servanda bench theory` holds each against
# enumeration and an adversarial search.

from servanda.bounds.assumptions import ASSUMPTIONS, Assumption
from servanda.bounds.theorem import THEOREMS, Standing, Theorem, theorem
from servanda.bounds.weighting import PSI, Psi, weight_gap

__all__ = [
    "ASSUMPTIONS",
    "PSI",
    "THEOREMS",
    "Assumption",
    "Psi",
    "Standing",
    "Theorem",
    "theorem",
    "weight_gap",
]
