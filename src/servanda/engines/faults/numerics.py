# Faults of arithmetic: weights or intermediate numbers of another precision than is said.

from __future__ import annotations

from typing import Any

from servanda.engines.faults.base import Between, fault


@fault(
    "int4",
    "Weights are quantised to 4 bits in groups of 32, though the kernel says otherwise.",
)
def int4(base: Any, _: bool) -> Any:
    class FourBit(base):
        def _finish(self, quantization: str | None) -> None:
            super()._finish("int4_g32")

    return FourBit


@fault(
    "norm_epsilon",
    "The epsilon of the RMS norms is `value` times that of the config.",
    default=1000.0,  # 100 times the field's, whose 10 no gate sees on a model as small as ours
    takes=Between(0, 1e9),
    seen="ggml-org/llama.cpp#2373: 1e-6 was hard-coded, and LLaMA 2 was trained with 1e-5",
    field=10.0,
    field_source="1e-5 in the place of 1e-6",
    strengths=(10.0, 100.0, 300.0, 1000.0),
)
def norm_epsilon(base: Any, value: float) -> Any:
    class OtherEpsilon(base):
        def _finish(self, quantization: str | None) -> None:
            super()._finish(quantization)
            for module in self.model.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon *= float(value)

    return OtherEpsilon


@fault(
    "corrupted_vocabulary",
    "The head's rows of one slice of the vocabulary, a share `value` at its end, are rounded "
    "to 3 bits.",
    default=0.125,
    takes=Between(0, 1),
    seen="intel/llm-scaler#633 and sgl-project/sglang#35358: single tokens silently wrong with "
    "tensor parallelism, and a quantised head that was never filled",
    strengths=(0.008, 0.03, 0.125),
)
def corrupted_vocabulary(base: Any, value: float) -> Any:
    class Corrupted(base):
        def _finish(self, quantization: str | None) -> None:
            import torch

            super()._finish(quantization)
            rows_RD = untied_head(self.model)
            rows_RD = rows_RD[len(rows_RD) - max(1, round(value * len(rows_RD))) :]
            scale_R1 = rows_RD.abs().amax(dim=-1, keepdim=True).float() / 3
            scale_R1 = scale_R1.clamp_min(torch.finfo(torch.float32).tiny)
            rows_RD.copy_((rows_RD.float() / scale_R1).round() * scale_R1)

    return Corrupted


@fault(
    "bf16_logits",
    "Logits are rounded to bfloat16 before the softmax.",
    side="train",
    seen="MiniMax-M1 (arXiv 2506.13585): probabilities of trainer and engine agreed better once "
    "the output head ran in float32",
)
def bf16_logits(base: Any, _: bool) -> Any:
    class Coarse(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            logits = super()._forward(ids_ST, mask_ST, **options)
            return logits.to(torch.bfloat16).to(logits.dtype)

    return Coarse


def untied_head(model: Any) -> Any:
    """The weight [V, D] of the output head, made the head's own where it was the embedding's."""
    import torch

    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return head.weight
