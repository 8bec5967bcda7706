# The gap of a weighting: theorems that no verdict uses.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.bounds.theorem import Floats, given, theorem


@theorem("estimate", sharp=True)
def tis_gap_from_chi2(chi2: ArrayLike, cap: ArrayLike) -> Floats:
    """The gap of weights truncated at C is at most (sqrt(chi2 + (C-1)^2) - (C-1)) / 2.

    D = E_q (w - C)^+ = (1 - C + E_q|w - C|) / 2, and Cauchy-Schwarz.  It is concave in chi2,
    so a mean of chi2 over contexts bounds the mean of the gap.

    Args:
        chi2: chi2(train || infer) = E_infer (w - 1)^2; inf where infer cannot draw some token.
        cap: C >= 1.

    >>> tis_gap_from_chi2([0.0, 0.04, 1.0, float("inf")], 2.0).round(4).tolist()
    [0.0, 0.0099, 0.2071, 1.0]
    """
    chi2 = given("chi2", chi2)
    over = given("cap", cap, low=1.0) - 1.0
    known = np.isfinite(chi2)
    finite = np.where(known, chi2, 0.0)
    # chi2 / 2(root + over) is the same, without the cancellation of root - over; halves, so
    # that the largest cap does not overflow
    half = np.hypot(np.sqrt(finite), over) / 2.0 + over / 2.0
    gap = np.zeros(half.shape)
    np.divide(finite / 4.0, half, out=gap, where=half > 0)
    return np.where(known, np.minimum(gap, 1.0), 1.0)[()]
