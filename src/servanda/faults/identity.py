# Faults of identity: the engine serves something else than the policy in question.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from servanda.faults.base import fault
from servanda.identity import Description, digest_of

_STALE_SCALE = 2e-3  # about a hundred small optimiser steps


@fault("permuted_ids")
def permuted_ids(base: Any, value: Any) -> Any:
    """Speaks ids shifted by `value`, as an engine does that loaded another tokenizer."""

    class Permuted(base):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            size = super().describe().vocab_size
            return [[(i + int(value)) % size for i in ids] for ids in super().encode(texts)]

        def vocabulary(self) -> list[str]:
            tokens = super().vocabulary()
            return [tokens[(i - int(value)) % len(tokens)] for i in range(len(tokens))]

        def describe(self) -> Description:
            return replace(super().describe(), tokens=digest_of(self.vocabulary()))

    return Permuted


@fault("stale_weights")
def stale_weights(base: Any, value: Any) -> Any:
    """Loads the weights of an earlier step: every tensor off by seeded noise times `value`."""

    class Stale(base):
        def _load_state(self) -> dict[str, Any]:
            import torch

            generator = torch.Generator().manual_seed(0)
            state = super()._load_state()
            for name, tensor in state.items():
                noise = torch.randn(tensor.shape, generator=generator) * _STALE_SCALE * value
                state[name] = (tensor.float() + noise).to(tensor.dtype)
            return state

    return Stale
