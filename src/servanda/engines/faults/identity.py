# Faults of identity: the engine serves something else than the policy in question.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from servanda.contract.identity import Description, digest_of
from servanda.engines.faults.base import Between, fault
from servanda.engines.faults.numerics import untied_head

_STALE_SCALE = 2e-3  # about a hundred small optimiser steps


@fault(
    "permuted_ids",
    "Token ids are shifted by `value`, as in an engine that loaded another tokenizer.",
    default=1,
    takes=Between(1, 10_000_000, whole=True),
    seen="vllm-project/vllm#8904: one prompt, other token ids in Transformers and in the server",
    field=1,
    field_source="any shift",
)
def permuted_ids(base: Any, value: int) -> Any:
    class Permuted(base):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            size = super().describe().vocab_size
            return [[(i + value) % size for i in ids] for ids in super().encode(texts)]

        def vocabulary(self) -> list[str]:
            tokens = super().vocabulary()
            return [tokens[(i - value) % len(tokens)] for i in range(len(tokens))]

        def describe(self) -> Description:
            return replace(super().describe(), tokens=digest_of(self.vocabulary()))

    return Permuted


def _earlier(tensor: Any, generator: Any, value: float) -> Any:
    """The tensor as it was `value` hundreds of small steps ago: off by seeded noise."""
    import torch

    noise = torch.randn(tensor.shape, generator=generator) * (_STALE_SCALE * value)
    return (tensor.float() + noise).to(tensor.dtype)


@fault(
    "stale_weights",
    "The weights are those of an earlier step: every tensor is off by seeded noise times `value`.",
    default=1.0,
    takes=Between(0, 1000),
    seen="unslothai/unsloth#8701: every rollout came from the base model, the adapter ignored; "
    "huggingface/trl#5312: weights lost at sleep level 2",
    strengths=(0.001, 1.0),
)
def stale_weights(base: Any, value: float) -> Any:
    class Stale(base):
        def _load_state(self) -> dict[str, Any]:
            import torch

            generator = torch.Generator().manual_seed(0)
            state = super()._load_state()
            return {name: _earlier(t, generator, value) for name, t in state.items()}

    return Stale


@fault(
    "stale_tied_head",
    "The output head keeps the weights of an earlier step while the embedding it was tied to "
    "is fresh.",
    default=1.0,
    takes=Between(0, 1000),
    seen="vllm-project/vllm#51665 and PrimeIntellect-ai/prime-rl#2823: an embedding update need "
    "not reach a head that was loaded as a tensor of its own",
    field=0.01,
    field_source="one update behind",
    strengths=(0.01, 0.1, 0.3, 1.0),
)
def stale_tied_head(base: Any, value: float) -> Any:
    class StaleHead(base):
        def _finish(self, quantization: str | None) -> None:
            import torch

            super()._finish(quantization)
            # digests are of the checkpoint, which was received whole: identity is blind here
            weight = untied_head(self.model)
            weight.copy_(_earlier(weight, torch.Generator().manual_seed(0), value))

    return StaleHead
