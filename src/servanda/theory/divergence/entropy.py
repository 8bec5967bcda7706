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

    Where p and q are close, computed as sum (p - q) log q + p log(p/q), which avoids the difference
    of two large numbers.  Finite also for different supports; 0 does not mean that the rows agree.
    """
    pairs = rows.pairs
    p_RV = pairs.larger + np.minimum(pairs.difference, 0.0)
    q_RV = pairs.larger - np.maximum(pairs.difference, 0.0)
    # 0 log 0 = 0
    logp_RV, logq_RV = (np.maximum(x, -1000.0) for x in (pairs.train_logp, pairs.infer_logp))
    near_RV = pairs.difference * logq_RV + p_RV * pairs.log_weight
    far_RV = p_RV * logp_RV - q_RV * logq_RV
    return np.abs(np.where(pairs.gap < -1.0, far_RV, near_RV).sum(axis=-1))
