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
    return np.ceil(_unshared(train_NLK, infer_NLK)).mean(axis=-1)


@divergence("router_distance", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_distance(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of a token's experts that train did not pick, mean over layers, [N]."""
    return _unshared(train_NLK, infer_NLK).mean(axis=-1)


@divergence("router_touched", needs="routes", unit="", span=_SPAN, source=_SOURCE)
def router_touched(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """1 if the sets of any layer differ, else 0, [N]; NaN if a route is not recorded."""
    return np.ceil(_unshared(train_NLK, infer_NLK)).max(axis=-1)


def _unshared(train_NLK: Routes, infer_NLK: Routes) -> Floats:
    """The share of infer's experts that train did not pick, [N, L]; NaN if one is not recorded.

    Raises:
        ValueError: the routes are of another number of layers or experts.
    """
    if train_NLK.shape != infer_NLK.shape:
        raise ValueError(
            f"routes of {train_NLK.shape} and of {infer_NLK.shape} are not of one model"
        )
    shared_NL = (infer_NLK[..., :, None] == train_NLK[..., None, :]).any(axis=-1).mean(axis=-1)
    unknown_NL = np.isnan(train_NLK + infer_NLK).any(axis=-1)
    return np.where(unknown_NL, np.nan, 1 - shared_NL)
