# A LoRA adapter of rank r on every linear layer of the blocks, under the names that PEFT gives.
#
# B starts at 0, so that the first update is the first change.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

NAME = "default"
_SCALE = 2.0  # alpha / r


class Adapted(nn.Module):
    """A linear layer and an adapter: weight + scale * B A."""

    active_adapters = (NAME,)

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        down = torch.randn(rank, base.in_features, generator=generator)
        self.lora_A = nn.Parameter(down / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def get_delta_weight(self, _adapter: str) -> Tensor:
        return _SCALE * self.lora_B @ self.lora_A

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + _SCALE * (x @ self.lora_A.T) @ self.lora_B.T


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
