# Faults of position: the kernel believes a token stands elsewhere.

from __future__ import annotations

from typing import Any

from servanda.engines.faults.base import Between, fault


@fault(
    "bf16_positions",
    "Position ids are kept in bfloat16: exact up to 256, then rounded to multiples of 2, 4, ...",
    seen="huggingface/transformers#29285 and EleutherAI/gpt-neox#1003: rotary embeddings "
    "computed in the model's low precision go wrong in long contexts",
)
def bf16_positions(base: Any, _: bool) -> Any:
    class Rounded(base):
        def _positions(self, mask: Any) -> Any:
            import torch

            positions = super()._positions(mask)
            return positions.to(torch.bfloat16).to(positions.dtype)

    return Rounded


@fault(
    "wrong_rope_base",
    "The base of the rotary embedding is `value` times that of the config.",
    default=2.0,
    takes=Between(0, 1e6),
    seen="deepspeedai/DeepSpeed#8345 and Open-Athena/MarinFold#184: rope_theta moved into "
    "rope_parameters, readers of the old key silently fell back to 10000",
    field=0.02,
    field_source="500000 read as 10000",
    strengths=(1.01, 1.1, 1.3, 2.0),
)
def wrong_rope_base(base: Any, value: float) -> Any:
    class OtherBase(base):
        def _finish(self, quantization: str | None) -> None:
            import torch

            super()._finish(quantization)
            for module in self.model.modules():
                if hasattr(module, "inv_freq"):
                    # inv_freq_i = base ** (-i / n), i = 0 .. n - 1
                    steps = torch.arange(len(module.inv_freq)) / len(module.inv_freq)
                    module.inv_freq *= float(value) ** -steps

    return OtherBase
