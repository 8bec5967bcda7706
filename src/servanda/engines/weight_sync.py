# A weight sync: what a trainer does after an update, here from a torch module into an engine.
#
# Tensors travel by the names of the checkpoint.  An adapter travels merged into the weight it
# belongs to, as trainers send it.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from servanda.errors import MeasurementError

# In the names of PEFT: weights of an adapter, and the original of a layer that is trained whole.
_ADAPTER = re.compile(r"\.(lora_\w+|original_module)\.")
# What PEFT, torch.compile, activation checkpointing and data parallelism put into names.
_WRAPPING = re.compile(
    r"^(module\.|_orig_mod\.|base_model\.model\.)+"
    r"|(?<=\.)(base_layer|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module)\."
)


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
        module: dict[str, Any] = dict(self.module.named_modules())
        for name, tensor in self.module.named_parameters():
            if _ADAPTER.search(name):
                continue
            wrapper, saved, rest = name.partition(".modules_to_save.")
            if saved and rest.partition(".")[0] not in module[wrapper].active_adapters:
                continue
            tensor = tensor.detach()
            layer, wrapped, leaf = name.partition(".base_layer.")
            if wrapped and leaf == "weight" and hasattr(module[layer], "get_delta_weight"):
                tensor = self._merged(module[layer], tensor)
            yield _WRAPPING.sub("", name), tensor

    def _merged(self, layer: Any, weight: Tensor) -> Tensor:
        """A weight with the adapters on it that the trainer's own forward uses.

        Raises:
            MeasurementError: an adapter that is more than a sum on the weight.
        """
        if layer.disable_adapters:
            return weight
        for adapter in layer.active_adapters:
            if adapter in layer.merged_adapters or adapter not in layer.scaling:
                continue
            if layer.lora_variant.get(adapter) or layer.lora_bias.get(adapter):
                raise MeasurementError(
                    f"adapter {adapter!r} is not plain LoRA (DoRA, or with a bias), and the sync "
                    "does not know how it is merged",
                    hint="call model.merge_adapter() before the sync, unmerge_adapter() after",
                )
            weight = weight + layer.get_delta_weight(adapter).detach()
        return weight

    def _cast(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels."""
        return tensor
