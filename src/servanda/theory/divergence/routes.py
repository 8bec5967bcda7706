# Routes: the experts that a mixture of experts sends a token to, in each of its layers.
#
# A route is that of the position whose logits predict the token.  The order of the experts of one
# layer has no meaning: their outputs are added up.
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
    return (shared_experts(train_NLK, infer_NLK) < 1).mean(axis=-1) + _unknown(train_NLK, infer_NLK)


@divergence("router_distance", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_distance(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of a token's experts that train did not pick, mean over layers, [N]."""
    shared_NL = shared_experts(train_NLK, infer_NLK)
    return (1 - shared_NL).mean(axis=-1) + _unknown(train_NLK, infer_NLK)


@divergence("router_touched", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_touched(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """1 if the sets of any layer differ, else 0, [N]; NaN if a route is not recorded."""
    differs_N = (shared_experts(train_NLK, infer_NLK) < 1).any(axis=-1).astype(np.float64)
    return differs_N + _unknown(train_NLK, infer_NLK)


def shared_experts(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of infer's experts that train picked too, [N, L].

    Raises:
        ValueError: the routes are of another number of layers or experts.
    """
    if train_NLK.shape != infer_NLK.shape:
        raise ValueError(
            f"routes of {train_NLK.shape} and of {infer_NLK.shape} are not of one model"
        )
    return (infer_NLK[..., :, None] == train_NLK[..., None, :]).any(axis=-1).mean(axis=-1)


def _unknown(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """NaN where a route is not recorded, else 0; [N]."""
    unknown_N = (np.isnan(train_NLK) | np.isnan(infer_NLK)).any(axis=(-1, -2))
    return np.where(unknown_N, np.nan, 0.0)
