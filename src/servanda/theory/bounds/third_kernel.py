# A third kernel between train and infer: the same weights with other routes, or older weights.
#
# TV is a distance, so that a way over a third distribution is never shorter.  Each TV is
# that of one context, a mean over contexts as infer draws them, or that of whole responses.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.bounds.theorem import Floats, given, theorem

_TV = "a total variation is in [0, 1]; give an upper bound of it"
# the largest change of a gap, in TV of p: how steep |w - psi(w)| falls and rises
STEEP = {"naive": 2.0, "clip": 2.0, "tis": 1.0, "is": 1.0}


@theorem("certificate", sharp=True)
def tv_with_own_routes(tv_replayed: ArrayLike, tv_of_routes: ArrayLike) -> Floats:
    """The TV of train with its own routes is at most that with infer's plus that of the routes.

    For a mixture of experts: TV(p_own, q) <= TV(p_replayed, q) + TV(p_own, p_replayed).

    Args:
        tv_replayed: of infer and of train with the experts that infer recorded.
        tv_of_routes: of train with its own experts and with the recorded ones, on the same tokens.

    >>> tv_with_own_routes(0.01, [0.02, 1.0]).tolist()
    [0.03, 1.0]
    """
    replayed = given("tv_replayed", tv_replayed, high=1.0, hint=_TV)
    return np.minimum(replayed + given("tv_of_routes", tv_of_routes, high=1.0, hint=_TV), 1.0)


@theorem("certificate", sharp=True)
def weight_gap_with_lag(gap: ArrayLike, tv_of_lag: ArrayLike, psi: Psi) -> Floats:
    """The gap of stale tokens is at most the kernels' gap plus a multiple of the TV of the lag.

    The multiple is 2 for naive and clipped weights and 1 for truncated ones.  The gap of a mask
    jumps where a weight crosses the band, so that no distance bounds its change.

    Args:
        gap: D_psi of train and infer at the weights that sampled.
        tv_of_lag: TV of train at its present weights and at those.
        psi: the weighting, of train at its present weights over infer.

    Raises:
        EvidenceError: the weighting is a mask.

    >>> from servanda.theory.bounds.importance_weights import PSI
    >>> weight_gap_with_lag(0.01, 0.02, PSI["tis"](2.0)).item()
    0.03
    """
    if psi.name not in STEEP:
        raise EvidenceError(
            f"the weighting is {psi.name!r}, whose gap jumps at the ends of its band",
            hint="measure weight_gap with the stale tokens, or use tis, which has no jump",
        )
    hint = "the gap is that of `weight_gap`, never negative: cut a signed upper end at 0"
    steep, gap = STEEP[psi.name], given("gap", gap, hint=hint)
    lag = given("tv_of_lag", tv_of_lag, high=1.0, hint=_TV)
    return np.minimum(gap + steep * lag, psi.span[1])
