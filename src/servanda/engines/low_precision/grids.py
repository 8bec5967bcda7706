# The numbers that an element of a low-precision format can be, and the rounding to them.
#
# Everything rounds to the nearest, ties to even, and saturates at the largest number.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """An element.

    Args:
        most: what the largest magnitude of a block is scaled to.
        to_codes: values in float32, any shape, as they are stored.
        to_values: the same values in float32, from what is stored.
    """

    most: float
    to_codes: Callable[[Tensor], Tensor]
    to_values: Callable[[Tensor], Tensor]


def _float8(dtype: torch.dtype) -> Grid:
    most = torch.finfo(dtype).max
    return Grid(most, lambda v: v.clamp(-most, most).to(dtype), lambda c: c.to(torch.float32))


def _int8(value: Tensor) -> Tensor:
    return value.round().clamp(-127, 127).to(torch.int8)


def _packed(nibble: Tensor) -> Tensor:
    """Two numbers of 0..15 in a byte, that of the even index in its low half."""
    return nibble[..., 0::2] | nibble[..., 1::2] << 4


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _int4(least: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Integers from `least` to 7, stored plus 8."""

    def to_codes(value: Tensor) -> Tensor:
        return _packed((value.round().clamp(least, 7) + 8).to(torch.uint8))

    def to_values(packed: Tensor) -> Tensor:
        return _nibbles(packed).to(torch.float32) - 8

    return to_codes, to_values


# the magnitudes of e2m1 by their codes; the fourth bit is the sign
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _e2m1_codes(value: Tensor) -> Tensor:
    size = value.abs().clamp_max(6)
    # numbers are 1/2 apart up to 2, then 1, then 2; an even quotient is an even mantissa
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = (size / step).round() * step
    code = torch.bucketize(size, torch.tensor(_E2M1, device=value.device)).to(torch.uint8)
    return _packed(code | value.signbit().to(torch.uint8) << 3)


def _e2m1_values(packed: Tensor) -> Tensor:
    signed = torch.tensor((*_E2M1, *(-x for x in _E2M1)), device=packed.device)
    return signed[_nibbles(packed).long()]


INT8 = Grid(127, _int8, lambda codes: codes.to(torch.float32))
INT4 = Grid(7, *_int4(-7))
# as compressed-tensors has it: 15 steps from -7.5 to 7.5, of which the last is cut off
INT4_FULL = Grid(7.5, *_int4(-8))
E4M3 = _float8(torch.float8_e4m3fn)
E5M2 = _float8(torch.float8_e5m2)
E2M1 = Grid(6, _e2m1_codes, _e2m1_values)
