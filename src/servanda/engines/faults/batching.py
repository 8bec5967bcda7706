# Faults of batching: a sequence's numbers depend on the company it runs in.

from __future__ import annotations

from typing import Any

from servanda.engines.faults.base import fault
from servanda.engines.faults.values import Between


@fault(
    "batch_dependent",
    "A share `value` of each row's logits comes from its neighbour in the batch.",
    default=0.1,
    takes=Between(0, 1),
    seen="ml-explore/mlx-lm#1457: rows of a batched decode step returned corrupted logits; "
    "vllm-project/vllm#9567: logprobs that move with the batch by more than rounding",
    strengths=(0.001, 0.01, 0.1),
)
def batch_dependent(base: Any, value: float) -> Any:
    class Leaky(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            logits = super()._forward(ids_ST, mask_ST, **options)
            if len(logits) == 1:
                return logits
            with torch.inference_mode():
                return logits.lerp(logits.roll(1, dims=0), value)

    return Leaky
