# What a broken sync may make of all tensors: values in other places, or rounded changes.

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Order = Callable[[Tensor, Tensor], Tensor]  # of a tensor, and of what it was at the start
_AXES = "the first two axes of stacked experts are exchanged"


def _moved(places: float) -> Order:
    """Each value so many places further; below 1, so large a share of its tensor."""

    def order(new: Tensor, _: Tensor) -> Tensor:
        far = places if abs(places) >= 1 else math.ceil(places * new.numel())
        return new.reshape(-1).roll(int(far)).reshape(new.shape)

    return order


def _stacked(new: Tensor, _: Tensor) -> Tensor:
    return new.reshape(*new.shape[1::-1], -1).transpose(0, 1) if new.dim() == 3 else new


def _restacked(new: Tensor, _: Tensor) -> Tensor:
    return new.transpose(0, 1).reshape(new.shape) if new.dim() == 3 else new


def _rounded(format_: str) -> Order:
    def order(new: Tensor, start: Tensor) -> Tensor:
        start = start.to(new.device)
        return start + (new - start).to(getattr(torch, format_)).to(new.dtype)

    return order


# (cause, what is wrong, the order)
ORDERS: list[tuple[str, str, Order]] = [
    ("misplaced", "each value is one place after its own in its tensor", _moved(1)),
    ("misplaced", "each value is one place before its own in its tensor", _moved(-1)),
    ("misplaced", "each half of a tensor is in the place of the other", _moved(1 / 2)),
    ("misplaced", "each quarter of a tensor is in the place of the next", _moved(1 / 4)),
    ("misplaced", "each quarter of a tensor is in the place of the one before", _moved(-1 / 4)),
    ("misplaced", "each eighth of a tensor is in the place of the next", _moved(1 / 8)),
    ("misplaced", "each eighth of a tensor is in the place of the one before", _moved(-1 / 8)),
    ("misplaced", _AXES, _stacked),
    ("misplaced", _AXES, _restacked),
    ("wrong_cast", "what changes is rounded to float8_e4m3fn", _rounded("float8_e4m3fn")),
    ("wrong_cast", "what changes is rounded to float8_e5m2", _rounded("float8_e5m2")),
]
