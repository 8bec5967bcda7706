# The fields of a batch's tokens for slices.  Numbers that count columns of one turn are looked up
# by row, without work per token.
#
# Axes: B sequences, T tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.atoms import Classes
from servanda.rl.monitor.batch import Batch
from servanda.theory.stats import device_arrays as arrays

Array = NDArray[Any]


@dataclass(frozen=True)
class BatchFields:
    """The `TokenFields` of a batch."""

    batch: Batch

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch.mask_BT.shape

    def labels(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        none = ("",) * self.batch.sequences
        return [*zip(*(self.batch.labels.get(name, none) for name in names), strict=True)]

    def of_sequences(self, code_S: Array) -> Array:
        return arrays.moved(code_S[:, None], self.batch.mask_BT)

    def codes(self, field: str, classes: Classes) -> tuple[Array, int]:
        batch, size = self.batch, len(classes)
        table = classes.of_counts(batch.mask_BT.shape[1])
        if field in _FROM_START and batch.one_turn:
            code_BT = arrays.moved(_shifted(table, batch), batch.mask_BT)
            return code_BT, size - 1  # never unknown, the last class
        values = COLUMNS[field](batch)
        if values is None:
            unknown = np.full((1, 1), size - 1, dtype=np.int32)
            return arrays.moved(unknown, batch.mask_BT), size
        values = arrays.moved(values, batch.mask_BT)
        if arrays.is_whole(values):
            return arrays.take(table, values), size - 1
        return classes.of_values(values), size


def _shifted(table: Array, batch: Batch) -> Array:
    """A table read from the first trained column of each row on, [B, T] or [1, T].

    For numbers that count the columns of one turn, rows are copied as a whole.
    """
    width = batch.mask_BT.shape[1]
    start_B = batch.start_B[batch.start_B < width]
    if not len(start_B) or (start_B == start_B[0]).all():
        at_T = np.arange(width) - (start_B[0] if len(start_B) else 0)
        return table.take(at_T, mode="clip")[None]
    padded = np.concatenate([np.repeat(table[:1], width), table])
    if arrays.is_tensor(batch.mask_BT):
        first_B, column_T = (
            arrays.moved(at, batch.mask_BT) for at in (width - batch.start_B, np.arange(width))
        )
        return arrays.take(padded, first_B[:, None] + column_T)
    return np.lib.stride_tricks.sliding_window_view(padded, width)[width - batch.start_B]


def _before(batch: Batch) -> Array:
    """Number of earlier trained tokens of the sequence, [B, T]; valid for trained tokens."""
    return arrays.running_count(batch.mask_BT) - 1


def _starts(batch: Batch) -> Array:
    """Mask of the beginnings of turns, [B, T]."""
    starts_BT = batch.mask_BT & True  # a copy
    starts_BT[:, 1:] &= ~batch.mask_BT[:, :-1]
    return starts_BT


def _turn(batch: Batch) -> Array:
    if batch.one_turn:
        return np.ones((1, 1), dtype=np.int32)
    return arrays.running_count(_starts(batch))


def _in_turn(batch: Batch) -> Array:
    before_BT = _before(batch)
    return before_BT - arrays.running_most(before_BT * _starts(batch))


# in a sequence of one turn, these count its columns from the first trained one
_FROM_START = ("context.position", "context.turn_position")
# the fields of a trainer's tokens, [B, 1], [1, T] or [B, T]; None: missing in this step
COLUMNS: dict[str, Callable[[Batch], Array | None]] = {
    "request.prompt_tokens": lambda batch: batch.start_B.astype(np.int32)[:, None],
    "context.position": _before,
    "context.length": lambda batch: np.arange(batch.mask_BT.shape[1], dtype=np.int32)[None],
    "context.turn": _turn,
    "context.turn_position": _in_turn,
    "outcome.staleness": lambda batch: batch.staleness_BT,
}
