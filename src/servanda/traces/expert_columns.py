# The columns of a trace that hold the experts of each token, and the weights of the experts.
#
# Axes: N tokens, L layers with a router, K experts of a token.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_ROUTE, _GATE = "route.", "gate."


def route_column(layer: int, k: int) -> str:
    """The column of the k-th expert of a layer."""
    return f"{_ROUTE}{layer}.{k}"


def gate_column(layer: int, k: int) -> str:
    """The column of the weight of the k-th expert of a layer."""
    return f"{_GATE}{layer}.{k}"


def routes(columns: Mapping[str, Array]) -> Array | None:
    """The experts, [N, L, K]; None if not recorded."""
    return _values(columns, _ROUTE)


def gates(columns: Mapping[str, Array]) -> Array | None:
    """The experts and their weights, [N, L, K, 2]; None if not recorded."""
    route_NLK, gate_NLK = _values(columns, _ROUTE), _values(columns, _GATE)
    if route_NLK is None or gate_NLK is None:
        return None
    return np.stack([route_NLK, gate_NLK], axis=-1)


def _values(columns: Mapping[str, Array], prefix: str) -> Array | None:
    shape = [name.split(".")[1:] for name in columns if name.startswith(prefix)]
    if not shape:
        return None
    layers, experts = (1 + max(map(int, parts)) for parts in zip(*shape, strict=True))
    values_LKN = [
        [columns[f"{prefix}{layer}.{k}"] for k in range(experts)] for layer in range(layers)
    ]
    return np.moveaxis(np.array(values_LKN), -1, 0)
