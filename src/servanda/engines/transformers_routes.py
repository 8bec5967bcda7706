# Which experts the routers of a mixture pick, as a model of Transformers runs.
#
# Transformers names the modules that route (`_can_record_outputs["router_logits"]`); of what one
# returns, the whole numbers are the experts.
# Axes: S rows of a chunk, T columns that are fed, C columns that are kept, L layers, K experts.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servanda.traces.trace import route_column


class RouteRecorder:
    """Keeps the experts of each forward of a model; empty for a model without routers."""

    def __init__(self, model: Any) -> None:
        self._picked: list[Tensor] = []
        self.routers = [*_routers(model)]
        for router in self.routers:
            router.register_forward_hook(self._keep)

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        self._picked += [p for p in parts if isinstance(p, Tensor) and not p.is_floating_point()]

    def taken(self, rows: int, columns: int) -> NDArray[np.int64] | None:
        """The experts of the forward that has just run, sorted, [S, C, L, K].

        Args:
            rows: S of that forward; columns: C, the last of its columns.

        Returns:
            None where the routers do not return their experts.
        """
        picked, self._picked = self._picked, []
        if not picked or len(picked) != len(self.routers):
            return None
        route_LNK = torch.stack([part.reshape(-1, part.shape[-1]) for part in picked])
        route_LSTK = route_LNK.unflatten(1, (rows, -1))[:, :, -columns:]
        return route_LSTK.sort(dim=-1).values.permute(1, 2, 0, 3).cpu().numpy()


def route_columns(route_NLK: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Routes as columns of a trace, [N] each."""
    _, layers, experts = route_NLK.shape
    return {
        route_column(layer, k): route_NLK[:, layer, k].astype(np.float64)
        for layer in range(layers)
        for k in range(experts)
    }


def _routers(model: Any) -> Iterator[Any]:
    """The modules that route, in the order in which they run."""
    named = [
        getattr(part, "_can_record_outputs", None) or {}
        for part in model.modules()
        if hasattr(part, "_can_record_outputs")
    ]
    recorders = [found["router_logits"] for found in named if "router_logits" in found]
    kinds = {getattr(one, "target_class", one) for one in recorders}
    yield from (part for part in model.modules() if type(part) in kinds)
