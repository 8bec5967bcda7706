# The trainer's scores with its weights as a sync sends them: rounded to the format of the engine.
#
# An engine in bfloat16 cannot follow an update that is smaller than its rounding: at a learning
# rate of 1e-6 most weights need dozens of steps to reach their next bfloat16 number.  With the
# trainer's weights rounded in the same way, both sides move by the same amount, and the error of
# the rounding, which all tokens share, is on both sides.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from servanda.errors import ContractError, MeasurementError
from servanda.rl.sync_drill.trainee import Rows, Score, forward_logprobs, modes_kept
from servanda.theory.sampling import Floats

Cast = Callable[[Tensor], Tensor]


class SentWeights:
    """Scores of a module with each weight as its engine receives it.

    While it scores it needs memory for one more copy of the weights that are sent.

    Args:
        module: the trainer's; LoRA adapters of PEFT are merged, as a sync does.
        cast: the engine's dtype, such as "bfloat16"; or a function of one tensor that returns it
            rounded as the engine rounds it; None: weights are sent as they are.
        logprobs: rows of token ids -> the module's logprobs; default: its forward pass.

    Raises:
        ContractError: no such dtype.
    """

    def __init__(
        self, module: Any, cast: str | Cast | None = None, logprobs: Score | None = None
    ) -> None:
        self.module = module
        self.cast = _cast_to(cast) if isinstance(cast, str) else cast
        self.logprobs = logprobs or (lambda rows: forward_logprobs(module, rows))

    def __call__(self, rows: Rows) -> list[Floats]:
        """The logprobs of each row's tokens except the first, nats, without dropout.

        Raises:
            MeasurementError: an adapter that is more than a sum on the weight.
        """
        with modes_kept(self.module), torch.no_grad(), self._sent():
            self.module.eval()
            return list(self.logprobs(rows))

    @contextmanager
    def _sent(self) -> Iterator[None]:
        """The module with the values that are sent; its own are put back bit for bit."""
        own: list[tuple[Tensor, Tensor]] = []
        try:
            if self.cast is not None:
                for tensor, values in [*self._values()]:
                    own.append((tensor, tensor.data))
                    tensor.data = values
            yield
        finally:
            for tensor, values in own:
                tensor.data = values

    def _values(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight with its sent values; of an adapted layer the merged ones, and B = 0."""
        assert self.cast is not None
        adapters: set[int] = set()
        for layer in self.module.modules():
            if not hasattr(layer, "get_delta_weight") or layer.disable_adapters:
                continue
            merged = layer.base_layer.weight.data
            for name in layer.active_adapters:
                if name in layer.merged_adapters or name not in layer.scaling:
                    continue
                if layer.lora_variant.get(name) or layer.lora_bias.get(name):
                    raise MeasurementError(
                        f"adapter {name!r} is not plain LoRA (DoRA, or with a bias)",
                        hint="pass your own scores of the trainer, with the adapter merged",
                    )
                merged = merged + layer.get_delta_weight(name).data
                held = layer.lora_B if name in layer.lora_B else layer.lora_embedding_B
                second = getattr(held[name], "weight", held[name])  # a layer, or the tensor itself
                yield second, torch.zeros_like(second.data)
                adapters.add(id(second))
            yield layer.base_layer.weight, self.cast(merged).to(merged.dtype)
            adapters.add(id(layer.base_layer.weight))
        for parameter in self.module.parameters():
            if id(parameter) not in adapters:
                yield parameter, self.cast(parameter.data).to(parameter.dtype)


def _cast_to(name: str) -> Cast:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ContractError(
            f"torch has no dtype {name!r}", hint="name the engine's, such as bfloat16 or float16"
        )
    return lambda tensor: tensor.to(dtype)
