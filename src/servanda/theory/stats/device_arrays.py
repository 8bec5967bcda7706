# Array operations that NumPy and torch spell differently, for arrays that stay where they are.
#
# torch itself is never imported: a tensor has all that is needed.

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MIXED = (-7046029254386353131, -4417276706812531889)  # odd


def is_tensor(values: object) -> bool:
    return hasattr(values, "detach")


def is_whole(values: Any) -> bool:
    """Whether the numbers are whole."""
    return not values.is_floating_point() if is_tensor(values) else values.dtype.kind == "i"


def moved(values: Any, like: Any) -> Any:
    """An array, on the device of `like`."""
    if is_tensor(values) or not is_tensor(like):
        return values
    empty = like.new_empty(0)
    kind = {"f": empty.double, "b": empty.bool}.get(values.dtype.kind, empty.long)
    return like.new_tensor(np.ascontiguousarray(values), dtype=kind().dtype)


def hosted(values: Any) -> Array:
    """As a NumPy array."""
    return values.cpu().numpy() if is_tensor(values) else values


def take(table: Array, at: Any) -> Any:
    """table[at], with indexes clipped to the table."""
    if not is_tensor(at):
        return table.take(at, mode="clip")
    return moved(table, at)[at.long().clamp(0, len(table) - 1)]


def running_count(mask_BT: Any) -> Any:
    """Trained tokens of the sequence up to and including each, [B, T], int32."""
    if not is_tensor(mask_BT):
        return np.cumsum(mask_BT, axis=1, dtype=np.int32)
    return mask_BT.int().cumsum(dim=1).int()


def running_most(values_BT: Any) -> Any:
    """The largest value up to and including each, [B, T]."""
    if not is_tensor(values_BT):
        return np.maximum.accumulate(values_BT, axis=1)
    return values_BT.cummax(dim=1).values


def count(code: Any, size: int) -> Array:
    """How often each code of 0..size - 1 occurs; [size] on the host."""
    if not is_tensor(code):
        return np.bincount(code.ravel(), minlength=size)
    return hosted(code.flatten().bincount(minlength=size))


def classes(values: Any, edges: Array) -> Any:
    """The class of each number: below the first edge 0, on it 1, up to the next 2, ..., NaN."""
    if not is_tensor(values):
        at = np.searchsorted(edges, values, "left") + np.searchsorted(edges, values, "right")
        if values.dtype.kind == "f":
            at = np.where(np.isnan(values), 2 * len(edges) + 1, at)
        return at.astype(np.int32)
    wide = values.double()
    at = wide.new_zeros(wide.shape).int()
    for edge in edges.tolist():  # few
        at += (wide > edge).int() + (wide >= edge).int()
    return at.masked_fill(wide.isnan(), 2 * len(edges) + 1)


def mixed(whole: Any) -> Any:
    """Whole numbers of a tensor, int64, mixed so that sums of different ones differ."""
    once = whole * _MIXED[0]
    return (once ^ (once >> 29)) * _MIXED[1]


def spread(values: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast to a shape."""
    return values.expand(shape) if is_tensor(values) else np.broadcast_to(values, shape)
