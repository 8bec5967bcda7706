# The noise that the preflight test puts into weights: of each tensor's own mean and spread.
#
# Keyed by (seed, purpose, tensor), so that a test is reproducible in any order.

from __future__ import annotations

import zlib

import torch
from torch import Tensor

# below this share of a fresh layer's spread a tensor is nearly constant: an adapter's B at its
# start, the scales of an untrained norm
_HARDLY = 1e-3


def moments(tensor: Tensor) -> tuple[float, float]:
    """(mean, scale) of a tensor; the scale is its spread, or, if it is nearly constant, that of a
    fresh layer: a quarter of its mean, or 1 / sqrt(inputs) if the mean is 0.
    """
    values = _wide(tensor)
    if not bool(torch.isfinite(values).all()):
        values = values[torch.isfinite(values)]
    if not values.numel():
        return 0.0, 1.0
    mean = float(values.mean())
    spread = float(values.std(correction=0))
    fresh = abs(mean) / 4 or tensor.shape[-1] ** -0.5 if tensor.dim() else 1.0
    return mean, spread if spread > _HARDLY * fresh else fresh


def _wide(tensor: Tensor) -> Tensor:
    """Values in a type for computation, which float8 is not."""
    return tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()


def noise(tensor: Tensor, seed: int, purpose: str, name: str) -> Tensor:
    """Standard normal, of the shape and on the device of a tensor."""
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(f"{seed}/{purpose}/{name}".encode()))
    dtype = tensor.dtype if tensor.dtype.itemsize > 2 else torch.float32
    return torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=dtype)


def poison(tensor: Tensor, seed: int, name: str) -> Tensor:
    """The random replacement of a tensor, with its mean and spread."""
    mean, scale = moments(tensor)
    return mean + scale * noise(tensor, seed, "poison", name)


def is_zero_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is all zeros, and so hides its factors."""
    return tensor.dim() > 1 and not bool(torch.count_nonzero(_wide(tensor)))


def filling(tensor: Tensor, seed: int, name: str) -> Tensor:
    """The replacement of a matrix of zeros: a quarter of a fresh layer's spread."""
    return moments(tensor)[1] / 4 * noise(tensor, seed, "filling", name)
