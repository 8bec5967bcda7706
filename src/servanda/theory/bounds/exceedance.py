# Exceedances: what a share of tokens beyond a log-ratio leaves open about the mean.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.theory.bounds.domain import given
from servanda.theory.bounds.theorem import theorem


@theorem("certificate", sharp=True)
def tv_from_exceedance(rho: ArrayLike, share: ArrayLike) -> NDArray[np.float64]:
    """If all but a share s of tokens have |log p - log q| <= rho, TV <= s + (1-s)(1 - e^-rho).

    Of infer's tokens those beyond rho may lose all their mass under train, the others a
    factor of e^-rho.  On average over contexts too: it is linear in the share.

    Args:
        rho: nats, >= 0.
        share: of the tokens as infer draws them, in [0, 1].

    >>> tv_from_exceedance(0.2, 0.01).round(4).item()
    0.1895
    """
    share = given("share", share, high=1.0)
    return share - (1.0 - share) * np.expm1(-given("rho", rho))
