# Speculative decoding of models of Transformers.
#
# A draft is verified by one forward over all its tokens, whose numbers are those of several columns
# at once, as in a server; what was rejected is cut from the cache.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from servanda.contract.model import Kernel
from servanda.contract.speculation import OPTION
from servanda.engines.speculative_engine import SpeculativeEngine
from servanda.engines.transformers import TransformersEngine
from servanda.engines.transformers_prefixes import odd_layer
from servanda.engines.transformers_steps import refuse_cacheless, steps_of
from servanda.errors import MeasurementError
from servanda.traces.trace import Batch


class SpeculativeTransformers(SpeculativeEngine):
    """A model that verifies drafts, of a smaller one or of prompt lookup."""

    healthy = TransformersEngine

    @classmethod
    def of(cls, kernel: Kernel, whole: Any) -> Callable[[Kernel], Any]:
        """The class over an engine's own.

        Raises:
            MeasurementError: another key of the kernel excludes it.
        """
        others = [f"options.{name}" for name in kernel.options or {} if name != OPTION]
        others += ["prefix_cache"] if kernel.prefix_cache is not None else []
        if others:
            raise MeasurementError(
                f"{others[0]} and options.{OPTION} exclude each other in engine 'transformers'",
                hint="remove one of the two",
            )
        return cls.over(whole)

    def _continuations(self, chunk: Batch) -> list[CachedText]:
        return [CachedText(self, self.kernel.prefill_chunk) for _ in chunk.prompts]


class CachedText:
    """One text in the cache of a model."""

    def __init__(self, engine: Any, step: int | None) -> None:
        refuse_cacheless(engine.model)
        self._engine, self._step, self._cache = engine, step, engine._cache()
        self._length = 0
        _refuse_windows(self._cache, engine.folder)

    def feed(self, tokens: Sequence[int], keep: int) -> Tensor:
        logits_TV = []
        for step in steps_of(len(tokens), self._step):
            self._length += step.stop - step.start
            kept = max(1, min(step.stop - step.start, keep - len(tokens) + step.stop))
            logits_1TV = self._engine._forward(
                torch.tensor([tokens[step]]),
                torch.ones((1, self._length), dtype=torch.int64),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=kept,
            )
            logits_TV.append(logits_1TV[0])
        return torch.cat(logits_TV)[-keep:]

    def cut(self, length: int) -> None:
        if length < self._length:
            self._cache.crop(length - self._length)  # so many from the end
            self._length = length


def _refuse_windows(cache: Any, folder: Any) -> None:
    """Let a model pass whose cache can be cut: what is left is what it was before."""
    if odd := odd_layer(cache):
        raise MeasurementError(
            f"a rejected draft is cut from the cache, and {folder} has layers whose cache cannot "
            f"be cut ({odd})",
            hint=f"remove options.{OPTION}, or let engine vllm run this model",
        )
