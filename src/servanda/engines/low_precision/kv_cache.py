# A cache of keys and values in low precision: attention reads what the cache holds.
#
# Axes: S rows, H heads of keys, T columns, D width of a head.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from servanda.engines.low_precision.formats import Format
from servanda.engines.low_precision.grids import E4M3, E5M2, INT8, Grid
from servanda.errors import MeasurementError


def _dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


def _unscaled(grid: Grid) -> Callable[[Tensor], Tensor]:
    """With a scale of 1, as servers have it for a checkpoint without calibrated scales."""
    return lambda x: grid.to_values(grid.to_codes(x.float()))


# names of vLLM; per_token_head: a scale of its own for each token and head
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": _dtype(torch.bfloat16),
    "float16": _dtype(torch.float16),
    "fp8_e4m3": _unscaled(E4M3),
    "fp8_e5m2": _unscaled(E5M2),
    "fp8_per_token_head": Format(E4M3, (1, 0)).rounded,
    "int8_per_token_head": Format(INT8, (1, 0)).rounded,
}


class RoundedCache(transformers.DynamicCache):
    """Keys and values [S, H, T, D] go through the type `kind` when they enter.

    Raises:
        MeasurementError: a model with latent attention, of which servers keep other numbers.
    """

    def __init__(self, config: Any, kind: str) -> None:
        if getattr(config.get_text_config(), "kv_lora_rank", None):
            raise MeasurementError(
                f"kv_cache={kind} would round the keys of each head, and servers of a model with "
                "latent attention keep its latent vectors",
                hint="remove the key kv_cache, or compare with a server that has the quantised "
                "cache",
            )
        super().__init__(config=config)
        self._rounded = ROUNDED[kind]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any) -> Any:
        keys, values = (self._rounded(x).to(x.dtype) for x in (keys, values))
        return super().update(keys, values, layer, *args, **options)
