# The product that makes the logits, in a dtype of its own.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
