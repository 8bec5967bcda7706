# The prefix cache of engine `transformers`: keys and values of whole blocks of prompts.
#
# A block is found under the salt of its request and all tokens up to its end, as servers do.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from servanda.errors import MeasurementError

Block = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [1, H, size, D]
_MOST = 4096  # blocks that are kept; the one that was used least recently goes first


class PrefixCache:
    """Blocks of `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: OrderedDict[Hashable, Block] = OrderedDict()

    def found(self, prompt: Sequence[int], key: Callable[[Sequence[int]], Hashable]) -> list[Block]:
        """The cached blocks that a prompt begins with; its last token is always computed."""
        blocks: list[Block] = []
        for end in range(self.size, len(prompt), self.size):
            block = self._blocks.get(key(prompt[:end]))
            if block is None:
                break
            self._blocks.move_to_end(key(prompt[:end]))
            blocks.append(block)
        return blocks

    def age(self, key: Hashable) -> int:
        """Blocks that were kept or read after this one; 0 if it is not there."""
        return next((n for n, other in enumerate(reversed(self._blocks)) if other == key), 0)

    def keep(self, key: Hashable, cache: Any) -> None:
        """Keep the last block of what a cache of Transformers holds."""
        self._blocks[key] = [
            (layer.keys[:, :, -self.size :].clone(), layer.values[:, :, -self.size :].clone())
            for layer in cache.layers
        ]
        if len(self._blocks) > _MOST:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def refuse_windows(cache: Any, folder: Path) -> None:
    """Let a model pass whose layers keep all keys and values.

    Raises:
        MeasurementError: one has a window, or a state.
    """
    from transformers.cache_utils import DynamicLayer

    kinds = (type(layer) for layer in cache.layers)
    odd = next((kind.__name__ for kind in kinds if kind is not DynamicLayer), None)
    if odd is not None:
        raise MeasurementError(
            f"the prefix cache holds keys and values of whole texts, and {folder} has layers "
            f"that keep others ({odd})",
            hint="remove the key prefix_cache",
        )
