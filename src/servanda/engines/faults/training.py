# Faults of the train side: the trainer's own numbers are not those of the policy.

from __future__ import annotations

import hashlib
from typing import Any

from servanda.engines.faults.base import Between, fault


@fault(
    "dropout_in_train",
    "Attention dropout of `value` is left on while logprobs are computed.",
    side="train",
    default=0.1,
    takes=Between(0, 0.9),
    seen="huggingface/trl#3234: dropout is switched off for GRPO, since with it logprobs are "
    "not reproducible and the first ratios are not 1",
    field=0.1,
    field_source="attn_pdrop of GPT-2",
    strengths=(0.001, 0.01, 0.1),
)
def dropout_in_train(base: Any, value: float) -> Any:
    class Dropping(base):
        def _finish(self, quantization: str | None) -> None:
            super()._finish(quantization)
            for module in self.model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = float(value)
                    module.train()

        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            # A fresh mask a forward, as in a trainer: the same sequences in another batch are
            # masked otherwise, which is the side's noise floor.  It is keyed by what is fed, so
            # that a run that is resumed or repeated reads the same numbers.
            fed = ids_ST.numpy().tobytes() + str(tuple(mask_ST.shape)).encode()
            seed = int.from_bytes(hashlib.blake2b(fed, digest_size=7).digest(), "big")
            there = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=there):
                torch.manual_seed(seed)
                return super()._forward(ids_ST, mask_ST, **options)

    return Dropping
