# Golden texts where one side gives only its likeliest tokens: intervals instead of values.
#
# Each position has a lower and an upper end of every metric that top k bounds, as joint
# columns NAME.low and NAME.high, and what mass the far side left out, as `tail`.

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from servanda.errors import MeasurementError
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.topk import interval
from servanda.theory.divergence.topk_rows import TopK, TopRows
from servanda.theory.sampling import log_softmax
from servanda.traces.trace import Trace

BOUNDED = tuple(name for name, metric in DIVERGENCES.items() if "topk" in metric.forms)
TAIL = "tail"
_NEAR = 1024  # best tokens of the side whose logits are here; more add nothing but time
_SLACK = 1e-6  # the far side's logprobs were stored in float32


def bounded(train: Iterable[NDArray[np.floating]], infer: Trace, vocabulary: int) -> Trace:
    """The trace of the far side (see `Engine.top`) with an interval at each of its positions.

    Args:
        train: full logits [R, V] at the same positions, in pieces, row after row.
        vocabulary: V of the far side.

    Raises:
        MeasurementError: other numbers of rows or tokens.
    """
    assert infer.best is not None  # what `Engine.top` is for
    far_ids_NK, far_logp_NK = infer.best
    parts: list[dict[str, NDArray[np.float64]]] = []
    at = 0
    for logits_RV in train:
        rows = slice(at, at + len(logits_RV))
        at = rows.stop
        if logits_RV.shape[1] != vocabulary or at > len(infer.token_N):
            raise MeasurementError(
                f"{at} rows of {logits_RV.shape[1]} logits for {len(infer.token_N)} golden tokens "
                f"of a vocabulary of {vocabulary}"
            )
        with np.errstate(invalid="ignore"):
            logp_RV = log_softmax(logits_RV)
        found = TopRows(
            _near(logp_RV, vocabulary),
            TopK(far_ids_NK[rows], far_logp_NK[rows], vocabulary, slack=_SLACK),
        )
        columns = {TAIL: np.where(found.usable_R, found.infer.tail_R, np.nan)}
        for name in BOUNDED:
            columns[f"{name}.low"], columns[f"{name}.high"] = interval(name, found).T
        joint = {f"joint.{name}": column for name, column in columns.items()}
        token_R = infer.token_N[rows]
        parts.append({"logp_train": logp_RV[np.arange(len(token_R)), token_R], **joint})
    if at != len(infer.token_N):
        raise MeasurementError(f"{at} rows of logits for {len(infer.token_N)} golden tokens")
    return Trace(
        infer.sequence_S,
        infer.length_S,
        infer.lost_S,
        infer.length_S + 1,  # the prompt of a golden text is the whole text
        infer.token_N,
        {
            "logp": infer.columns["logp"],
            "p_max": np.exp(far_logp_NK[:, 0]),
            **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        },
        infer.about,
    )


def _near(logp_RV: NDArray[np.float64], vocabulary: int) -> TopK:
    """The best tokens of whole rows; a row with NaN has none."""
    kept = min(_NEAR, vocabulary)
    ids_RK = np.argpartition(-logp_RV, kept - 1, axis=-1)[:, :kept]
    return TopK(ids_RK, np.take_along_axis(logp_RV, ids_RK, axis=-1), vocabulary)
