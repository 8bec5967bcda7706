# A quantised model: its linear layers and experts, but not its head, embeddings and routers.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, dtype, nn
from torch.nn import functional as F

from servanda.errors import MeasurementError
from servanda.registry import did_you_mean

# Formats of tensors: a grid for the elements, and scales for blocks of them.
#
# A block's scale is its largest magnitude over the largest number of the grid, in float32, or a
# rounding of that.  No scale depends on other sequences of a batch: activations have theirs by
# token.
# A number that is not finite makes its whole block NaN: it stays visible.
# Axes: O rows (out features, or tokens), I columns (in features), G x H blocks of them.


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


# A cache of keys and values in low precision: attention reads what the cache holds.
#
# Axes: S rows, H heads of keys, T columns, D width of a head.


def _dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


def _unscaled(grid: Grid) -> Callable[[Tensor], Tensor]:
    """With a scale of 1, as servers have it for a checkpoint without calibrated scales."""
    return lambda x: grid.to_values(grid.to_codes(x.float()))


# names of vLLM; per_token_head: a scale of its own for each token and head
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": _dtype(torch.bfloat16),
    "float16": _dtype(torch.float16),
    "fp8_e4m3": _unscaled(E4M3),
    "fp8_e5m2": _unscaled(E5M2),
    "fp8_per_token_head": Format(E4M3, (1, 0)).rounded,
    "int8_per_token_head": Format(INT8, (1, 0)).rounded,
}


class RoundedCache(transformers.DynamicCache):
    """Keys and values [S, H, T, D] go through the type `kind` when they enter.

    Raises:
        MeasurementError: a model with latent attention, of which servers keep other numbers.
    """

    def __init__(self, config: Any, kind: str) -> None:
        if getattr(config.get_text_config(), "kv_lora_rank", None):
            raise MeasurementError(
                f"kv_cache={kind} would round the keys of each head, and servers of a model with "
                "latent attention keep its latent vectors",
                hint="remove the key kv_cache, or compare with a server that has the quantised "
                "cache",
            )
        super().__init__(config=config)
        self._rounded = ROUNDED[kind]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any) -> Any:
        keys, values = (self._rounded(x).to(x.dtype) for x in (keys, values))
        return super().update(keys, values, layer, *args, **options)


# The product that makes the logits, in a dtype of its own.


class Head(nn.Module):
    """In the place of a model's head: the same weight, which may be tied, another product.

    Hidden states and weight are cast to the dtype; logits have it.
    """

    def __init__(self, head: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = head.weight, head.bias, dtype

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)


def set_head_dtype_(model: Any, name: str) -> None:
    """Let a causal language model compute its logits in a dtype, in place."""
    model.set_output_embeddings(Head(model.get_output_embeddings(), getattr(torch, name)))


# Linear layers of a quantised model, and the stacked ones of experts.
#
# Without a format for its inputs a layer multiplies in their dtype, with its weight rounded to it
# once.  With one, both factors are what the format holds, and the sum is in float32, as tensor
# cores do it; only the order of summation is another.
# Axes: E experts, O out features, I in features, N rows.


class _Quantized(nn.Module):
    """Codes and scales of weights [..., O, I]."""

    codes: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, quantization: Quantization) -> None:
        super().__init__()
        self.quantization, self.shape = quantization, weight.shape
        codes, scale = quantization.weight.encode(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights this layer multiplies with; rounded to `dtype` once."""
        return self.quantization.weight.decode(self.codes, self.scale).to(dtype)

    def take_over(self, weight: Tensor) -> None:
        """Quantise other weights of the same shape, in place; what holds the layer keeps it."""
        codes, scale = self.quantization.weight.encode(weight.to(self.scale.device))
        self.codes.copy_(codes)
        self.scale.copy_(scale)


class QuantizedLinear(_Quantized):
    """In the place of a linear layer."""

    def __init__(self, linear: nn.Linear, quantization: Quantization) -> None:
        super().__init__(linear.weight, quantization)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.codes, self.scale, self.quantization, self.bias)


class QuantizedExperts(_Quantized):
    """In the place of a parameter [E, O, I], of which code takes one expert at a time."""

    def __getitem__(self, expert: Any) -> _Expert:
        return _Expert(self, int(expert))


class _Expert:
    """Stands for the weight [O, I] of an expert where torch's `linear` is called."""

    def __init__(self, experts: QuantizedExperts, expert: int) -> None:
        self.experts, self.expert = experts, expert

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        x, weight, *bias = (*args, *(kwargs or {}).values())
        if func is not F.linear or not isinstance(weight, cls):
            raise MeasurementError(
                f"quantised experts are used by {getattr(func, '__name__', func)}, and only linear "
                "is supported",
                hint="remove quantization for this architecture",
            )
        of = weight.experts
        codes, scale = of.codes[weight.expert], of.scale[weight.expert]
        return _product(x, codes, scale, of.quantization, *bias)


def _product(
    x: Tensor, codes: Tensor, scale: Tensor, quantization: Quantization, bias: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias, [..., O], in the dtype of x."""
    weight = quantization.weight
    if quantization.inputs is None:
        return F.linear(x, weight.decode(codes, scale).to(x.dtype), bias)
    rows_NI = x.flatten(0, -2)
    if has_tensor_cores(x.device, quantization) and not codes.shape[0] % 16 | codes.shape[1] % 16:
        y_NO = product_of_torch(rows_NI, codes, scale, quantization, bias)
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        rounded_NI = quantization.inputs.rounded(rows_NI).to(wide)
        y_NO = F.linear(
            rounded_NI,
            weight.decode(codes, scale).to(wide),
            None if bias is None else bias.to(wide),
        )
    return y_NO.to(x.dtype).unflatten(0, x.shape[:-1])


def has_tensor_cores(device: torch.device, quantization: Quantization) -> bool:
    """Whether products of a format are computed by the device, and not emulated.

    They are for e4m3 with scales of a tensor or of channels, from compute capability 8.9 on.
    """
    weight, inputs = quantization.weight, quantization.inputs
    by_rows = weight.block[1] == 0 and inputs is not None and inputs.block == (1, 0)
    if device.type != "cuda" or weight.grid is not E4M3 or not by_rows:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def product_of_torch(
    rows_NI: Tensor, codes: Tensor, scale: Tensor, quantization: Quantization, bias: Tensor | None
) -> Tensor:
    """The product by torch's own kernel of FP8, bfloat16 [N, O]."""
    from torch.nn.functional import ScalingType, scaled_mm  # of torch 2.10 and later

    assert quantization.inputs is not None
    x_codes, x_scale = quantization.inputs.encode(rows_NI)
    scale_1O = scale.reshape(1, -1).expand(1, len(codes)).contiguous()
    y_NO = scaled_mm(
        *(x_codes, codes.t()),
        *(x_scale.reshape(-1, 1), ScalingType.RowWise),
        *(scale_1O, ScalingType.RowWise),
    )
    return y_NO if bias is None else y_NO + bias


def check_quantization(name: str) -> None:
    """Refuse a quantisation that is not here.

    Raises:
        MeasurementError: with what there is.
    """
    if name not in QUANTIZED:
        raise MeasurementError(
            f"engine 'transformers' has no quantization {name!r}",
            hint=did_you_mean(name, QUANTIZED),
        )


def quantize_(model: Any, name: str) -> None:
    """Replace, in place, every linear layer of a causal language model but its head and adapter.

    In a tied model the head is the embedding, and the two stay one.  Of a mixture, the experts are
    quantised too, and the routers are not.

    Raises:
        MeasurementError: an unknown name, or a layer that the format cannot hold.
    """
    check_quantization(name)
    quantization = QUANTIZED[name]
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        try:
            if ".lora_" in f".{path}":
                continue  # an adapter stays in the dtype, as servers run it
            if isinstance(module, nn.Linear) and module is not head:
                model.set_submodule(path, QuantizedLinear(module, quantization))
            else:
                _quantize_experts(module, quantization)
        except MeasurementError as error:
            (problem,) = error.problems
            message = f"{path}: {problem.message}"
            raise MeasurementError(message, hint=problem.hint) from None


def _quantize_experts(module: Any, quantization: Quantization) -> None:
    """Replace the parameters [E, O, I] of a module: they hold a matrix for each expert."""
    stacks = [*module.named_parameters(recurse=False)] if "Expert" in type(module).__name__ else []
    stacks = [(name, parameter) for name, parameter in stacks if parameter.ndim == 3]
    if not stacks:
        return
    if not hasattr(module, "is_transposed") or module.is_transposed:
        raise MeasurementError(
            f"{type(module).__name__} stores its experts in a layout that no quantization here has",
            hint="remove quantization, or use an engine that has this architecture quantised",
        )
    module.config._experts_implementation = "eager"  # one expert at a time, by `linear`
    for name, parameter in stacks:
        delattr(module, name)
        setattr(module, name, QuantizedExperts(parameter, quantization))


def take_over(model: Any, named: Iterable[tuple[str, Tensor]], dtype: dtype) -> set[str]:
    """Copy tensors into a model, in its own precision; a quantised layer is quantised anew.

    Raises:
        MeasurementError: a tensor that the model does not have, or of another shape.
    """
    plain = model.state_dict()
    if any(".lora_" in name for name in plain):
        raise MeasurementError(
            "a kernel with the key adapter takes over no weights",
            hint="remove the key, and send tensors with the adapter merged",
        )
    layers: dict[str, QuantizedLinear | QuantizedExperts] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear | QuantizedExperts):
            layers[f"{path}.weight" if isinstance(layer, QuantizedLinear) else path] = layer
            for leaf, _ in layer.named_buffers():
                del plain[f"{path}.{leaf}"]
    taken: set[str] = set()
    for name, tensor in named:
        layer = layers.get(name)
        if layer is None and name not in plain:
            raise MeasurementError(
                f"the sync sends {name!r}, which the model does not have",
                hint="send tensors by the names of the checkpoint, adapters merged",
            )
        shape = plain[name].shape if layer is None else layer.shape
        if tensor.shape != shape:
            raise MeasurementError(
                f"the sync sends {name!r} as {tuple(tensor.shape)}, and the model has "
                f"{tuple(shape)}",
                hint="send whole tensors, by the names of the checkpoint",
            )
        if layer is None:
            plain[name].copy_(tensor.detach())
        else:
            layer.take_over(tensor.detach().to(dtype))
        taken.add(name)
    return taken
