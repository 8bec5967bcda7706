# Whether the two kernels disagree on the most likely token.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import Floats, LogitRows, divergence

_SPAN = (0.0, 1.0)


@divergence(
    "top1_flip",
    needs="logits",
    unit="",
    span=_SPAN,
    source="definition",
    of_sums=lambda sums: sums.flip,
)
def top1_flip_exact(rows: LogitRows) -> Floats:
    """1 if the top-1 tokens of the two rows differ, else 0, [R]; ties go to the lower id."""
    return (rows.train_RV.argmax(axis=-1) != rows.infer_RV.argmax(axis=-1)).astype(np.float64)


@divergence("top1_flip", needs="top1", unit="", span=_SPAN, source="definition")
def top1_flip(top1_train_N: Floats, top1_infer_N: Floats) -> Floats:
    """1 if the recorded top-1 tokens differ, else 0, [N]; NaN if one is not recorded."""
    flips_N = np.asarray(top1_train_N) != np.asarray(top1_infer_N)
    unknown_N = np.isnan(top1_train_N) | np.isnan(top1_infer_N)
    return np.where(unknown_N, np.nan, flips_N.astype(np.float64))
