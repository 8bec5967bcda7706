# Drift of logits: where an osc comes from, and what it becomes on its way to a choice.
#
# Casts add to it and temperature scales it.  What it does to a distribution is in logits.py.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.domain import Floats, given
from servanda.theory.bounds.theorem import theorem


def above_zero(name: str, value: ArrayLike, hint: str) -> Floats:
    array = np.asarray(value, dtype=np.float64)
    outside = ~((array > 0.0) & np.isfinite(array))
    if outside.any():
        found = array[outside].flat[0]
        raise EvidenceError(f"{name} is {found:g}, and must be finite and above 0", hint=hint)
    return array


@theorem("certificate", sharp=True)
def osc_at_temperature(osc: ArrayLike, tau: ArrayLike) -> Floats:
    """Sampling at temperature tau divides the osc by tau.

    Args:
        osc: of the logit drift before the temperature, nats, >= 0.
        tau: finite and above 0.

    >>> osc_at_temperature(0.125, 0.5).item()
    0.25
    """
    tau = above_zero("tau", tau, hint="a greedy kernel flips or it does not")
    with np.errstate(over="ignore"):
        return given("osc", osc) / tau


@theorem("certificate", source="IEEE 754-2019, round to nearest", sharp=True)
def rounding_eps(abs_logit: ArrayLike, bits: int) -> Floats:
    """Casting a number to a format of n significand bits moves it by at most half an ulp.

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

    Where both kernels cast theirs, the two osc add up.

    Args:
        abs_logit: the largest |logit| of a row; see `rounding_eps`.
        bits: of the significand, the hidden one included.

    Returns:
        Of the shape of abs_logit, nats.

    Raises:
        EvidenceError: as `rounding_eps`.

    >>> osc_from_rounding(20.0, 8).item()
    0.125
    """
    return 2.0 * rounding_eps(abs_logit, bits)
