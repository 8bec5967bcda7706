# Oscillation of the logit drift: what every sharp one-token bound is stated in.

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

    Tokens to which neither side gives mass are left out; a token that only one side can
    draw makes it inf.
    """
    highest_R = np.where(rows.neither_RV, -np.inf, rows.drift_RV).max(axis=-1)
    lowest_R = np.where(rows.neither_RV, np.inf, rows.drift_RV).min(axis=-1)
    return highest_R - lowest_R
