# Formats of tensors: a grid for the elements, and scales for blocks of them.
#
# A block's scale is its largest magnitude over the largest number of the grid, in float32, or a
# rounding of that.  No scale depends on other sequences of a batch: activations have theirs by
# token.
# A number that is not finite makes its whole block NaN: it stays visible.
# Axes: O rows (out features, or tokens), I columns (in features), G x H blocks of them.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from servanda.errors import MeasurementError

# The numbers that an element of a low-precision format can be, and the rounding to them.
#
# Everything rounds to the nearest, ties to even, and saturates at the largest number.


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


_TINY = torch.finfo(torch.float32).tiny
ScaleRule = Callable[[Tensor, float], Tensor]


def _float32_scale(amax: Tensor, most: float) -> Tensor:
    return (amax / most).clamp_min(_TINY)  # a block of zeros has a scale too


def _power_of_two(amax: Tensor, most: float) -> Tensor:
    """The least power of two under which no element saturates, as E8M0 holds it.

    Source: Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv 2506.08027.  The
    specification of OCP rounds down, and lets the largest elements saturate.
    """
    mantissa, exponent = torch.frexp(_float32_scale(amax, most))  # scale = mantissa * 2^exponent
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = torch.ldexp(torch.ones_like(amax), exponent.clamp(-126, 127))
    return torch.where(amax.isfinite(), power, torch.nan)


def _two_levels(axes: tuple[int, ...]) -> ScaleRule:
    """Scales in e4m3 of blocks, times one in float32 of all blocks of some axes.

    A block whose scale underflows is zero.

    Source: NVIDIA, Pretraining LLMs with NVFP4, arXiv 2509.25149, appendix C.
    """

    def scale(amax: Tensor, most: float) -> Tensor:
        whole = _float32_scale(amax.amax(dim=axes, keepdim=True), most * E4M3.most)
        return E4M3.to_values(E4M3.to_codes(_float32_scale(amax, most) / whole)) * whole

    return scale


@dataclass(frozen=True)
class Format:
    """How a matrix is stored.

    Args:
        block: rows and columns that share a scale; 0 for all of them.
        ragged: blocks at the edge may be smaller; otherwise the columns must be a multiple.
    """

    grid: Grid
    block: tuple[int, int]
    scale: ScaleRule = _float32_scale
    ragged: bool = False

    def encode(self, matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales.

        Args:
            matrix_OI: [..., O, I]; leading axes are separate matrices.

        Returns:
            codes [..., O, I], or half as many columns where two share a byte, and scales
            [..., G, 1, H, 1] in float32.

        Raises:
            MeasurementError: blocks that do not divide the columns.
        """
        rows, columns = matrix_OI.shape[-2:]
        if self.block[1] and columns % self.block[1] and not self.ragged:
            raise MeasurementError(
                f"a format with blocks of {self.block[1]} input features does not hold a layer "
                f"that has {columns}",
                hint="use a quantization with a scale for each channel, such as int8_weight_only",
            )
        blocks = self._blocks(matrix_OI.detach().to(torch.float32))
        scale = self.scale(blocks.abs().amax(dim=(-3, -1), keepdim=True), self.grid.most)
        values = torch.nan_to_num(blocks / scale, 0.0, 0.0, 0.0)
        return self.grid.to_codes(self._matrix(values, rows, columns)), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """What the codes stand for, float32 [..., O, I]."""
        values_OI = self.grid.to_values(codes)
        rows, columns = values_OI.shape[-2:]
        return self._matrix(self._blocks(values_OI) * scale, rows, columns)

    def rounded(self, matrix_OI: Tensor) -> Tensor:
        """The matrix as the format holds it, float32 [..., O, I]."""
        return self.decode(*self.encode(matrix_OI))

    def _blocks(self, matrix_OI: Tensor) -> Tensor:
        """As blocks, [..., G, block rows, H, block columns], zeros beyond the edges."""
        rows, columns = matrix_OI.shape[-2:]
        height, width = self.block[0] or rows, self.block[1] or columns
        padded = F.pad(matrix_OI, (0, -columns % width, 0, -rows % height))
        return padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))

    def _matrix(self, blocks: Tensor, rows: int, columns: int) -> Tensor:
        return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns]


@dataclass(frozen=True)
class Quantization:
    """Formats of the weights of linear layers, and of their inputs; None for the kernel's dtype."""

    weight: Format
    inputs: Format | None = None


def _float8_layers(grid: Grid, block: tuple[int, int]) -> Quantization:
    return Quantization(Format(grid, block), Format(grid, (1, 0)))


_MXFP8 = Format(E4M3, (1, 32), _power_of_two)
_NVFP4 = Format(E2M1, (1, 16), _two_levels((-4, -2)))
_NVFP4_INPUTS = Format(E2M1, (1, 16), _two_levels((-2,)))  # of each token
QUANTIZED: dict[str, Quantization] = {
    "int8_weight_only": Quantization(Format(INT8, (1, 0))),
    "w8a8": Quantization(Format(INT8, (1, 0)), Format(INT8, (1, 0))),
    "int4_g32": Quantization(Format(INT4, (1, 32))),
    "w4a16_g128": Quantization(Format(INT4_FULL, (1, 128))),
    "fp8_weight_only": Quantization(Format(E4M3, (1, 0))),
    "fp8_tensor": _float8_layers(E4M3, (0, 0)),
    "fp8_channel": _float8_layers(E4M3, (1, 0)),
    "fp8_block": Quantization(
        Format(E4M3, (128, 128), ragged=True), Format(E4M3, (1, 128), ragged=True)
    ),
    "fp8_e5m2_channel": _float8_layers(E5M2, (1, 0)),
    "mxfp8": Quantization(_MXFP8, _MXFP8),
    "mxfp4_weight_only": Quantization(Format(E2M1, (1, 32), _power_of_two)),
    "nvfp4": Quantization(_NVFP4, _NVFP4_INPUTS),
    "nvfp4_weight_only": Quantization(_NVFP4),
}
