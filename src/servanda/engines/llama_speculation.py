# Speculative decoding in llama.cpp: drafts by llama-cpp-python's prompt lookup, or a draft model.
#
# As llama.cpp decides on drafts: the target draws, and a draft that is equal to what it drew needs
# no new call.  So a kernel with drafts draws what it draws without them, up to the rounding of a
# call with several tokens of a sequence.

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.speculation import SpeculativeConfig
from servanda.engines.llama_model import LlamaModel, TokenInput
from servanda.engines.llamacpp import LlamaCppEngine
from servanda.engines.speculative_engine import SpeculativeEngine
from servanda.theory.sampling import Ints
from servanda.traces.trace import Batch


class SpeculativeLlama(SpeculativeEngine):
    """A GGUF model that verifies drafts."""

    healthy = LlamaCppEngine

    def _continuations(self, chunk: Batch) -> list[LlamaText]:
        engine: Any = self
        longest = self._speculation.num_speculative_tokens if self._speculation else 0
        engine._begin(chunk, longest)
        return [LlamaText(engine.model, row) for row in range(len(chunk))]

    def _find(self, config: SpeculativeConfig) -> Callable[[Ints], Ints]:
        library: Any = importlib.import_module("llama_cpp.llama_speculative")
        most, longest = config.num_speculative_tokens, config.prompt_lookup_max
        return library.LlamaPromptLookupDecoding(max_ngram_size=longest, num_pred_tokens=most)


class LlamaText:
    """One sequence of the cache that all of a chunk share."""

    def __init__(self, model: LlamaModel, row: int) -> None:
        self._model, self._row, self._length = model, row, 0

    def feed(self, tokens: Sequence[int], keep: int) -> NDArray[np.float32]:
        first = len(tokens) - keep
        fed = [
            TokenInput(int(token), self._length + i, self._row, i >= first)
            for i, token in enumerate(tokens)
        ]
        self._length += len(tokens)
        return np.concatenate(list(self._model.feed(fed)))

    def cut(self, length: int) -> None:
        if length < self._length:
            self._model.cut(self._row, length)
            self._length = length
