# A prefill in steps of so many tokens, as servers run long prompts: its memory grows with the cache
# of keys and values alone, and not with the square of the length.
# Axes: S rows of a chunk, T columns that are fed, C columns that are kept, N given tokens.

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints

NOTHING = np.zeros(0, dtype=np.int64)  # columns of a step of which no logits are asked


def steps_of(columns: int, size: int | None) -> list[slice]:
    """The columns of each forward of a prefill; without a size there is one."""
    size = size or columns
    return [slice(at, min(at + size, columns)) for at in range(0, columns, size)]


def logits_in_steps(
    forward: Callable[..., Tensor],
    ids_ST: Tensor,
    mask_ST: Tensor,
    places: tuple[Ints, Ints],
    size: int,
) -> Tensor:
    """Logits [N, V] of some places of a text; no other logits are kept.

    Args:
        forward: runs the columns of a step, with the mask up to its end, and keeps `kept` of them;
            each step attends to those before it.
        places: row and column of each, [N].
    """
    row_N, column_N = places
    logits_NV: Any = None
    for step in steps_of(ids_ST.shape[1], size):
        in_N = (column_N >= step.start) & (column_N < step.stop)
        kept_C, at_N = np.unique(column_N[in_N] - step.start, return_inverse=True)
        logits_SCV = forward(ids_ST[:, step], mask_ST[:, : step.stop], kept=kept_C)
        if logits_NV is None:
            logits_NV = logits_SCV.new_empty(len(row_N), logits_SCV.shape[-1])
        if len(kept_C):
            logits_NV[in_N] = logits_SCV[row_N[in_N], at_N]
    return logits_NV


def refuse_cacheless(model: Any) -> None:
    """Refuse a model that takes no cache.

    Raises:
        MeasurementError: it would swallow the keyword, and score each token without those before.
    """
    taken = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    if not {"past_key_values", "cache"} & taken.keys():
        raise MeasurementError(
            f"{type(model).__name__} takes no past_key_values, so it cannot be decoded with a "
            "cache here",
            hint="score given tokens by prefill, or run the model in another engine",
        )
