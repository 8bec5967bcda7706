# Faults of position: the kernel believes a token stands elsewhere.

from __future__ import annotations

from typing import Any

from servanda.faults.base import fault


@fault("bf16_positions")
def bf16_positions(base: Any, value: Any) -> Any:
    """Position ids kept in bfloat16: exact up to 256, then rounded to multiples of 2, 4, ...

    A real fault of rotary embeddings in low precision, and one that no short prompt shows.
    """

    class Rounded(base):
        def _positions(self, mask: Any) -> Any:
            import torch

            positions = super()._positions(mask)
            return positions.to(torch.bfloat16).to(positions.dtype) if value else positions

    return Rounded
