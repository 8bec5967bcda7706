# A LoRA adapter of rank r on every linear layer of the blocks, under the names that PEFT gives.
#
# B starts at 0, so that the first update is the first change.

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

NAME = "default"
_SCALE = 2.0  # alpha / r


class Adapted(nn.Module):
    """A linear layer and an adapter: weight + scale * B A, with the names of a layer of PEFT."""

    active_adapters = (NAME,)
    merged_adapters = ()
    disable_adapters = False
    scaling: Mapping[str, float] = {NAME: _SCALE}
    lora_variant: Mapping[str, Any] = {}
    lora_bias: Mapping[str, bool] = {}

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        down_RI = torch.randn(rank, base.in_features, generator=generator)
        down_RI /= math.sqrt(base.in_features)
        up_OR = torch.zeros(base.out_features, rank)
        self.lora_A = nn.ParameterDict({NAME: down_RI})
        self.lora_B = nn.ParameterDict({NAME: up_OR})

    def get_delta_weight(self, adapter: str) -> Tensor:
        return self.scaling[adapter] * self.lora_B[adapter] @ self.lora_A[adapter]

    def forward(self, x: Tensor) -> Tensor:
        inside = x @ self.lora_A[NAME].T
        return self.base_layer(x) + _SCALE * inside @ self.lora_B[NAME].T


def with_adapter(module: Any, rank: int, seed: int) -> Any:
    """The module with its weights frozen and an adapter on each linear layer but the head."""
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(False)
    linear = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer is not module.get_output_embeddings()
    ]
    for name in linear:
        path, _, leaf = name.rpartition(".")
        parent = module.get_submodule(path)
        setattr(parent, leaf, Adapted(getattr(parent, leaf), rank, generator))
    return module
