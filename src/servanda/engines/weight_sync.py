# A weight sync: what a trainer does after an update, here from a torch module into an engine.
#
# Tensors travel by the names of the checkpoint.  An adapter travels merged into the weight it
# belongs to, as trainers send it.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

_LORA = "get_delta_weight"  # of a layer of PEFT that wraps `base_layer`


class Loads(Protocol):
    """An engine that takes over weights."""

    def load(self, named: Iterable[tuple[str, Tensor]], /) -> set[str]: ...


class WeightSync:
    """Copies the weights of a module into an engine; call it after each update.

    Who breaks the sync on purpose (faults/sync.py) may override any method.

    Args:
        module: a causal language model, which may be one of PEFT.
        engine: such as servanda.engines.transformers.TransformersEngine.
    """

    def __init__(self, module: nn.Module, engine: Loads) -> None:
        self.module = module
        self.engine = engine

    def __call__(self) -> None:
        self.engine.load((name, self._cast(tensor)) for name, tensor in self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in the checkpoint; a tied one once."""
        wrapped = {
            name: layer for name, layer in self.module.named_modules() if hasattr(layer, _LORA)
        }
        for name, tensor in self.module.named_parameters():
            path, _, leaf = name.rpartition(".")
            base, at, _ = path.rpartition(".base_layer")
            if any(part.startswith("lora_") for part in name.split(".")):
                continue
            tensor = tensor.detach()
            if at and base in wrapped and leaf == "weight":
                tensor = self._merged(wrapped[base], tensor)
            yield _of_checkpoint(name), tensor

    def _merged(self, layer: Any, weight: Tensor) -> Tensor:
        """A weight with the adapters on it."""
        for adapter in layer.active_adapters:
            weight = weight + layer.get_delta_weight(adapter).detach()
        return weight

    def _cast(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels."""
        return tensor


def _of_checkpoint(name: str) -> str:
    """A parameter's name without what PEFT wraps around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
