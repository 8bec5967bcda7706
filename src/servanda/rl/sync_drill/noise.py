# The noise that the preflight test puts into weights: of each tensor's own mean and spread.
#
# Each value depends on (seed, purpose, tensor) and on its place in the whole tensor, so a tensor
# gets the same noise in any order, on any device, and in shards of any number.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from servanda.rl.sync_drill.parallel.shards import Place
from servanda.rl.sync_drill.parallel.zero3 import FlatPlace, at_once

# below this share of a fresh layer's spread a tensor is nearly constant: an adapter's B at its
# start, the scales of an untrained norm
_HARDLY = 1e-3
# the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), as signed numbers
_GAMMA, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
_LANE = 1 << 16  # a value is the sum of four uniform numbers below this


@dataclass(frozen=True)
class Sums:
    """Of the finite values of a tensor; `nonzero` counts all values that are not 0."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    nonzero: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Sums:
        sums = cls()
        for chunk in tensor.detach().reshape(-1).split(at_once(tensor.device)):
            wide = chunk.double()
            nonzero = int(torch.count_nonzero(wide))
            wide = wide[torch.isfinite(wide)]
            total, squares = float(wide.sum()), float(wide.square().sum())
            sums = sums.plus(cls(wide.numel(), total, squares, nonzero))
        return sums

    def plus(self, other: Sums) -> Sums:
        return Sums(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            self.nonzero + other.nonzero,
        )

    def moments(self, shape: Sequence[int]) -> tuple[float, float]:
        """(mean, scale) of a tensor; the scale is its spread, or, if it is nearly constant, that of
        a fresh layer: a quarter of its mean, or 1 / sqrt(inputs) if the mean is 0.
        """
        if not self.count:
            return 0.0, 1.0
        mean = self.total / self.count
        spread = max(self.squares / self.count - mean * mean, 0.0) ** 0.5
        fresh = abs(mean) / 4 or shape[-1] ** -0.5 if shape else 1.0
        return mean, spread if spread > _HARDLY * fresh else fresh

    def is_zero_matrix(self, shape: Sequence[int]) -> bool:
        """Whether a tensor is all zeros, and so hides its factors."""
        return len(shape) > 1 and not self.nonzero


def noise(like: Tensor, place: Place | FlatPlace, key: str) -> Tensor:
    """Nearly normal noise of mean 0 and spread 1, within ±3.5, at the place of a shard.

    Args:
        like: the shard, for its shape, device and type.
        key: seed, purpose and name.
    """
    start = int.from_bytes(
        hashlib.blake2b(key.encode(), digest_size=8).digest(), "big", signed=True
    )
    dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
    values = torch.empty(like.shape, dtype=dtype, device=like.device)
    for rows, index in place.chunks(like.device):
        bits = _mixed(index * _GAMMA + start)
        lanes = sum((bits >> shift) & (_LANE - 1) for shift in (0, 16, 32, 48))
        values[rows if like.dim() else ...] = (lanes - 2 * (_LANE - 1)).to(dtype)  # pyright: ignore
    return values / ((_LANE**2 - 1) / 3) ** 0.5


def beyond(share: float) -> float:
    """The magnitude that a share of the noise exceeds, at most a twelfth.

    The sum of four uniform numbers in [0, 1] exceeds 4 - x with probability x ** 4 / 24, x <= 1.

    >>> round(beyond(0.005), 3)
    2.607
    """
    return (2 - (12 * share) ** 0.25) * 3**0.5


def _mixed(bits: Tensor) -> Tensor:
    """Random bits from consecutive numbers; int64 wraps around."""
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shifted right, with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
