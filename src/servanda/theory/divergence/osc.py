# Oscillation of the logit drift: the quantity of every sharp one-token bound.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import Floats, LogitRows, divergence


@divergence(
    "logit_osc_nats",
    needs="logits",
    unit="nat",
    source="max - min of the logit difference; blind to a common shift",
    of_sums=lambda sums: sums.high - sums.low,
)
def logit_osc(rows: LogitRows) -> Floats:
    """max - min over the vocabulary of (train - infer) logits, [R], nats.

    Tokens without mass on both sides are excluded; a token that only one side can sample makes it
    inf.
    """
    highest_R = np.where(rows.neither_RV, -np.inf, rows.drift_RV).max(axis=-1)
    lowest_R = np.where(rows.neither_RV, np.inf, rows.drift_RV).min(axis=-1)
    return highest_R - lowest_R
