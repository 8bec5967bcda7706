# Drift of logits: theorems that no verdict uses.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.theory.bounds.drift import above_zero
from servanda.theory.bounds.theorem import Floats, given, theorem


@theorem("certificate", sharp=True)
def osc_from_linf(linf: ArrayLike) -> Floats:
    """The osc of a drift is at most twice its largest absolute value.

    Args:
        linf: largest |drift| of a row, nats, >= 0; any shape.

    >>> osc_from_linf(0.0625).item()
    0.125
    """
    with np.errstate(over="ignore"):
        return given("linf", linf) * 2.0


@theorem("certificate", sharp=True)
def linf_with_repetition_penalty(linf: ArrayLike, theta: ArrayLike) -> Floats:
    """A repetition penalty theta stretches the largest |drift| by at most max(theta, 1/theta).

    It divides logits above 0 by theta and multiplies those below, so a common shift is no
    longer free: the bound is on |drift|, not on its osc.  Both kernels penalise the same
    tokens.

    Args:
        linf: largest |drift| of a row before the penalty, nats, >= 0.
        theta: finite and above 0; 1 leaves everything as it is.

    >>> linf_with_repetition_penalty(0.0625, [1.25, 0.5]).tolist()
    [0.078125, 0.125]
    """
    theta = above_zero("theta", theta, hint="a repetition penalty of 1 changes nothing")
    with np.errstate(over="ignore"):
        return given("linf", linf) * np.maximum(theta, 1.0 / theta)


@theorem("certificate", sharp=True)
def greedy_flip_impossible(margin: ArrayLike, osc: ArrayLike) -> NDArray[np.bool_]:
    """The greedy token cannot change if its margin over the second exceeds osc.

    Args:
        margin: best less second-best logit of either kernel, nats, >= 0.
        osc: of the logit drift, nats, >= 0.

    Returns:
        Of their common shape; False says that some drift of this osc flips or ties it.

    >>> greedy_flip_impossible([0.1, 0.125, 0.2], 0.125).tolist()
    [False, False, True]
    """
    return given("margin", margin) > given("osc", osc)
