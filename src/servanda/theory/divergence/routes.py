# Routes: the experts that a mixture of experts sends a token to, in each of its layers.
#
# A route is that of the position whose logits predict the token.  The order of the experts of one
# layer has no meaning: their outputs are added up, each times its weight (gate).
# Axes: N sampled tokens, L layers with a router, K experts of a token.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servanda.theory.divergence.base import Floats, divergence

Routes = NDArray[np.floating]

_SPAN = (0.0, 1.0)
_SOURCE = "definition; R3, arXiv 2510.11370"


@divergence("router_flip", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_flip(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of the layers whose two sets of experts differ, [N]; NaN if one is not recorded."""
    return np.ceil(_unshared(train_NLK, infer_NLK)).mean(axis=-1)


@divergence("router_distance", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_distance(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of a token's experts that train did not pick, mean over layers, [N]."""
    return _unshared(train_NLK, infer_NLK).mean(axis=-1)


@divergence("router_touched", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_touched(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """1 if the sets of any layer differ, else 0, [N]; NaN if a route is not recorded."""
    return np.ceil(_unshared(train_NLK, infer_NLK)).max(axis=-1)


@divergence("gate_drift", needs="gates", unit="", span=_SPAN, source="definition")
def gate_drift(train_NLK2: Routes, infer_NLK2: Routes) -> Floats:
    """Total variation between the two sides' weights of experts, mean over layers, [N].

    The weights of a layer are taken as shares of their sum, and an expert that a side did not pick
    has the weight 0.  NaN where a route is not recorded, and where weights are negative or all 0.

    Args:
        train_NLK2, infer_NLK2: experts and their weights, [N, L, K, 2].
    """
    (train_NLK, train_share_NLK), (infer_NLK, infer_share_NLK) = (
        (side[..., 0], _shares(side[..., 1])) for side in (train_NLK2, infer_NLK2)
    )
    same_NLKK = _same(train_NLK, infer_NLK)
    of_train_NLK = (same_NLKK * train_share_NLK[..., None, :]).sum(axis=-1)
    # the shares of both sides sum to 1, so what infer has more is half of all differences
    more_NL = np.maximum(infer_share_NLK - of_train_NLK, 0.0).sum(axis=-1)
    return np.where(_unknown(train_NLK, infer_NLK), np.nan, more_NL).mean(axis=-1)


def _shares(weight_NLK: NDArray[np.floating]) -> NDArray[np.floating]:
    sum_NL1 = weight_NLK.sum(axis=-1, keepdims=True)
    usable_NL1 = (weight_NLK >= 0).all(axis=-1, keepdims=True) & (sum_NL1 > 0)
    return weight_NLK / np.where(usable_NL1, sum_NL1, np.nan)


def _unshared(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of infer's experts that train did not pick, [N, L]; NaN if one is not recorded."""
    shared_NL = _same(train_NLK, infer_NLK).any(axis=-1).mean(axis=-1)
    return np.where(_unknown(train_NLK, infer_NLK), np.nan, 1 - shared_NL)


def _same(train_NLK: Routes, infer_NLK: Routes) -> NDArray[np.bool_]:
    """Whether each expert of infer is each of train, [N, L, K, K].

    Raises:
        ValueError: the routes are of another number of layers or experts.
    """
    if train_NLK.shape != infer_NLK.shape:
        raise ValueError(
            f"routes of {train_NLK.shape} and of {infer_NLK.shape} are not of one model"
        )
    return np.equal(infer_NLK[..., :, None], train_NLK[..., None, :])


def _unknown(train_NLK: Routes, infer_NLK: Routes) -> NDArray[np.bool_]:
    """The layers of which one side recorded not every expert, [N, L]."""
    return np.any(np.isnan(train_NLK + infer_NLK), axis=-1)
