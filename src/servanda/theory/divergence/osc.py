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


# The largest logit drift, at the common shift of all logits that makes it smallest.


@divergence(
    "logit_linf_nats",
    needs="logits",
    unit="nat",
    source="min over c of max |drift - c| = osc / 2",
    of_sums=lambda sums: (sums.high - sums.low) / 2,
)
def logit_linf(rows: LogitRows) -> Floats:
    """Largest |train - infer| logit at the common shift that makes it smallest, [R], nats.

    Half of `logit_osc_nats`: a shift of all logits changes no probability, so the plain
    largest difference would be misleading.
    """
    return logit_osc(rows) / 2
