# A quantised model: its linear layers and experts, but not its head, embeddings and routers.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, dtype, nn

from servanda.engines.low_precision.formats import QUANTIZED, Quantization
from servanda.engines.low_precision.layers import QuantizedExperts, QuantizedLinear
from servanda.errors import MeasurementError
from servanda.registry import did_you_mean


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
    """Replace the parameters [E, O, I] of a module."""
    stacks = [*_stacks(module)]
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


def _stacks(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module that hold a matrix for each expert."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.ndim == 3 and "Expert" in type(module).__name__:
            yield name, parameter


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
