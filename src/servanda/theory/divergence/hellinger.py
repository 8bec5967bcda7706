# Squared Hellinger distance: the one that multiplies over the tokens of a sequence.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence
from servanda.theory.divergence.pairs import Floats, Pairs


def hellinger2_terms(pairs: Pairs) -> Floats:
    """(sqrt p - sqrt q)^2 / 2 of each token."""
    return 0.5 * pairs.larger * np.expm1(pairs.gap / 2) ** 2


@divergence(
    "hellinger2",
    needs="logits",
    unit="",
    span=(0.0, 1.0),
    source="Hellinger 1909; H^2 = 1 - sum sqrt(p q), 1 - H^2 multiplies over tokens",
    of_sums=lambda sums: sums.hellinger2,
)
def hellinger2_exact(rows: LogitRows) -> Floats:
    """H^2 = 1 - sum sqrt(p q) of each row, [R], in [0, 1]; 1 for disjoint supports.

    Computed as sum (sqrt p - sqrt q)^2 / 2: 1 - sum sqrt(p q) loses all digits for two similar
    kernels.
    """
    return np.minimum(hellinger2_terms(rows.pairs).sum(axis=-1), 1.0)
