# Weight-only quantised linear layers: integers in memory, the activations' dtype in the product.
#
# Both are symmetric and round to nearest, so no weight moves by more than half its scale.
# A weight that is not finite makes its whole channel or group NaN: it stays visible.
# Axes: O out features, I in features, G groups of 32 in features, K bytes of a group.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from servanda.errors import MeasurementError

GROUP = 32


def round_symmetric(weight: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Integers in [-most, most] over the last axis, and one scale for it.

    Returns:
        the integers as float32, shaped like `weight`, and the scales, float32, last axis 1.
    """
    weight = weight.detach().to(torch.float32)
    tiny = torch.finfo(torch.float32).tiny  # a row of zeros has a scale too
    scale = (weight.abs().amax(dim=-1, keepdim=True) / most).clamp_min(tiny)
    # inf / inf and what follows from NaN: the integer is 0, the scale says what happened
    return torch.nan_to_num(weight / scale).round().clamp(-most, most), scale


class Int8WeightOnlyLinear(nn.Module):
    """One scale for each output channel, values -127..127: `weight` [O, I], `scale` [O, 1]."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values_OI, scale_O1 = round_symmetric(linear.weight, most=127)
        self.register_buffer("weight", values_OI.to(torch.int8))
        self.register_buffer("scale", scale_O1)
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight this layer multiplies with, [O, I]; rounded to `dtype` once."""
        return (self.weight * self.scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), self.bias)


class Int4GroupLinear(nn.Module):
    """One scale for each 32 input features, values -7..7: `packed` [O, G, K], `scale` [O, G, 1].

    A byte holds two values, each plus 8: that of the even input feature in its low half.
    """

    packed: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.in_features % GROUP:
            raise MeasurementError(
                f"int4_g32 groups {GROUP} input features, and a layer has {linear.in_features}",
                hint="use int8_weight_only for this model",
            )
        values_OGI, scale_OG1 = round_symmetric(linear.weight.unflatten(-1, (-1, GROUP)), most=7)
        nibble_OGI = (values_OGI + 8).to(torch.uint8)
        self.register_buffer("packed", nibble_OGI[..., 0::2] | nibble_OGI[..., 1::2] << 4)
        self.register_buffer("scale", scale_OG1)
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight this layer multiplies with, [O, I]; rounded to `dtype` once."""
        nibble_OGI = torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(-2)
        return ((nibble_OGI.to(torch.int8) - 8) * self.scale).flatten(-2).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), self.bias)


QUANTIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8_weight_only": Int8WeightOnlyLinear,
    "int4_g32": Int4GroupLinear,
}


def requantize_(layer: Any, weight_OI: Tensor) -> None:
    """Give a quantised layer another weight, in place; what holds the layer keeps it."""
    out_features, in_features = weight_OI.shape
    linear: Any = nn.utils.skip_init(  # an initialisation would draw from the caller's generator
        nn.Linear, in_features, out_features, bias=False, dtype=weight_OI.dtype
    )
    linear.weight.data.copy_(weight_OI)
    layer.load_state_dict(type(layer)(linear).state_dict(), strict=False)  # its bias stays


def check_quantization(name: str) -> None:
    """Refuse a quantisation that is not here.

    Raises:
        MeasurementError: with what there is.
    """
    if name not in QUANTIZED:
        raise MeasurementError(
            f"engine 'transformers' has no quantization {name!r}",
            hint=f"it has {' and '.join(QUANTIZED)}; leave the key out for none",
        )


def quantize_(model: Any, name: str) -> None:
    """Replace, in place, every linear layer of a causal language model but its head.

    In a tied model the head is the embedding, and the two stay one.

    Raises:
        MeasurementError: an unknown name, or a layer that the format cannot hold.
    """
    check_quantization(name)
    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or layer is head:
            continue
        try:
            model.set_submodule(path, QUANTIZED[name](layer))
        except MeasurementError as error:
            (problem,) = error.problems
            raise MeasurementError(f"{path}: {problem.message}", hint=problem.hint) from None


def take_over(model: Any, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> set[str]:
    """Copy tensors into a model, in its own precision; a quantised layer is quantised anew.

    Raises:
        MeasurementError: a tensor that the model does not have, or of another shape.
    """
    quantized = {
        path: layer for path, layer in model.named_modules() if type(layer) in QUANTIZED.values()
    }
    plain = model.state_dict()
    for path, layer in quantized.items():
        for leaf, _ in layer.named_buffers():
            del plain[f"{path}.{leaf}"]
    taken: set[str] = set()
    for name, tensor in named:
        path, _, leaf = name.rpartition(".")
        layer = quantized.get(path) if leaf == "weight" else None
        if layer is None and name not in plain:
            raise MeasurementError(
                f"the sync sends {name!r}, which the model does not have",
                hint="send tensors by the names of the checkpoint, adapters merged",
            )
        shape = plain[name].shape if layer is None else layer.dequantize().shape
        if tensor.shape != shape:
            raise MeasurementError(
                f"the sync sends {name!r} as {tuple(tensor.shape)}, and the model has "
                f"{tuple(shape)}",
                hint="send whole tensors, by the names of the checkpoint",
            )
        if layer is None:
            plain[name].copy_(tensor.detach())
        else:
            requantize_(layer, tensor.detach().to(dtype))
        taken.add(name)
    return taken
