# Drift of logits: sources of an osc, and its propagation to a choice of token.
#
# Casts add to it, temperature and a repetition penalty scale it, and a greedy choice is robust to
# it or not.  Its effect on a distribution is in logits.py.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.theory.bounds.domain import Floats, given
from servanda.theory.bounds.theorem import theorem


def _above_zero(name: str, value: ArrayLike, hint: str) -> Floats:
    array = np.asarray(value, dtype=np.float64)
    outside = ~((array > 0.0) & np.isfinite(array))
    if outside.any():
        found = array[outside].flat[0]
        raise EvidenceError(f"{name} is {found:g}, and must be finite and above 0", hint=hint)
    return array


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
def osc_at_temperature(osc: ArrayLike, tau: ArrayLike) -> Floats:
    """Sampling at temperature tau divides the osc by tau.

    Args:
        osc: of the logit drift before the temperature, nats, >= 0.
        tau: finite and above 0; for greedy choice see `greedy_flip_impossible`.

    >>> osc_at_temperature(0.125, 0.5).item()
    0.25
    """
    tau = _above_zero("tau", tau, hint="a greedy kernel flips or not: greedy_flip_impossible")
    with np.errstate(over="ignore"):
        return given("osc", osc) / tau


@theorem("certificate", sharp=True)
def linf_with_repetition_penalty(linf: ArrayLike, theta: ArrayLike) -> Floats:
    """A repetition penalty theta stretches the largest |drift| by at most max(theta, 1/theta).

    It divides logits above 0 by theta and multiplies those below, so a common shift is no
    longer free: the bound is on |drift|, not on its osc.  Both kernels penalise the same
    tokens.

    Args:
        linf: largest |drift| of a row before the penalty, nats, >= 0.
        theta: finite and above 0; 1 is neutral.

    >>> linf_with_repetition_penalty(0.0625, [1.25, 0.5]).tolist()
    [0.078125, 0.125]
    """
    theta = _above_zero("theta", theta, hint="a repetition penalty of 1 changes nothing")
    with np.errstate(over="ignore"):
        return given("linf", linf) * np.maximum(theta, 1.0 / theta)


@theorem("certificate", sharp=True)
def greedy_flip_impossible(margin: ArrayLike, osc: ArrayLike) -> NDArray[np.bool_]:
    """The greedy token cannot change if its margin over the second is more than osc.

    Args:
        margin: best less second-best logit of either kernel, nats, >= 0.
        osc: of the logit drift, nats, >= 0.

    Returns:
        Of their common shape; False: some drift of this osc flips or ties it.

    >>> greedy_flip_impossible([0.1, 0.125, 0.2], 0.125).tolist()
    [False, False, True]
    """
    return given("margin", margin) > given("osc", osc)


@theorem("certificate", source="IEEE 754-2019, round to nearest", sharp=True)
def rounding_eps(abs_logit: ArrayLike, bits: int) -> Floats:
    """Casting a number to a format of so many significand bits moves it by at most half an ulp.

    Args:
        abs_logit: |logit|, or a bound of it, within the normal numbers of the format: at
            least 2^-14 and at most 65504 for float16.
        bits: of the significand, the hidden one included, as in `divergence.precision.CAPTURES`.

    Returns:
        Of the same shape, in the unit of the logit; 0 at 0, which every format has.

    Raises:
        EvidenceError: an abs_logit is negative or NaN, or bits is not a whole number above 0.

    >>> rounding_eps([20.0, 9.0], 8).tolist(), rounding_eps(20.0, 11).item()
    ([0.0625, 0.03125], 0.0078125)
    """
    size = given("abs_logit", abs_logit)
    if not (isinstance(bits, (int, np.integer)) and bits >= 1):
        raise EvidenceError(
            f"bits is {bits!r}, and must be a whole number above 0",
            hint="24 for float32, 11 for float16, 8 for bfloat16: the hidden bit counts",
        )
    _, exponent = np.frexp(size)
    half_ulp = np.ldexp(1.0, exponent - 1 - int(bits))
    return np.where(np.isinf(size), np.inf, np.where(size > 0.0, half_ulp, 0.0))[()]


@theorem("certificate", source="IEEE 754-2019, round to nearest", sharp=True)
def osc_from_rounding(abs_logit: ArrayLike, bits: int) -> Floats:
    """Casting one kernel's logits is a drift of osc at most one ulp: twice `rounding_eps`.

    If both kernels cast theirs, the two osc add up.

    Args:
        abs_logit: the largest |logit| of a row; see `rounding_eps`.
        bits: of the significand, the hidden one included.

    Returns:
        Of the shape of abs_logit, nats.

    Raises:
        EvidenceError: see `rounding_eps`.

    >>> osc_from_rounding(20.0, 8).item()
    0.125
    """
    return 2.0 * rounding_eps(abs_logit, bits)
