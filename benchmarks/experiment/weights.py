# Arms without a contract: what a token's loss is multiplied with, from its ratio alone.

from __future__ import annotations

from servanda.theory.bounds.importance_weights import PSI, Psi

CAP = 2.0
BAND = (0.5, 2.0)
WEIGHTINGS: dict[str, Psi] = {
    "none": PSI["naive"](),
    "tis": PSI["tis"](CAP),
    "mis": PSI["mis"](BAND),
}
