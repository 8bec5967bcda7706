# Entropy: whether one kernel is surer of its next token than the other.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence
from servanda.theory.divergence.pairs import Floats


@divergence(
    "entropy_nats",
    needs="logits",
    unit="nat",
    source="|H(train) - H(infer)|, Shannon 1948",
    of_sums=lambda sums: sums.entropy_gap,
)
def entropy_gap(rows: LogitRows) -> Floats:
    """|H(train) - H(infer)| of each row, [R], nats.

    Computed as sum (p - q) log q + p log(p/q), which avoids the difference of two large numbers.
    Finite also for different supports; 0 does not mean that the rows agree.
    """
    pairs = rows.pairs
    p_RV = pairs.larger + np.minimum(pairs.difference, 0.0)
    only_train_RV = np.isposinf(pairs.log_weight)
    only_infer_RV = np.isneginf(pairs.log_weight)
    # if one side has no mass, the other adds only its own p log p
    logq_RV = np.where(np.isneginf(pairs.infer_logp), 0.0, pairs.infer_logp)
    weight_RV = np.where(only_infer_RV, 0.0, pairs.log_weight)
    weight_RV = np.where(only_train_RV, pairs.train_logp, weight_RV)
    return np.abs((pairs.difference * logq_RV + p_RV * weight_RV).sum(axis=-1))
