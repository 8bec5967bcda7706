# Drift of logits: where an osc comes from, and what it becomes on its way to a choice.
#
# Casts add to it and temperature scales it.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.theorem import DERIVED, Floats, given, theorem


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


# Logits: what a drift of one row of logits can do to the distribution of the next token.
#
# log q/p of token a is drift_a - log E_p e^drift, so everything hangs on osc = max - min of
# the drift: a common shift costs nothing.  Each divergence is largest at a drift of two
# levels, and none is attained by a bound in |drift| alone.  Every `osc` here is that of the drift
# of logits, in nats and >= 0.  An osc of inf is allowed: some token then has mass on one side
# only, and the bounds say what is left to say.


_ONE_ROW = ("same_filters",)
# (1 + 1/2n) B_2n / (2n)! for n = 1 to 7, B the Bernoulli numbers: the series of kl_from_osc
# in osc^2, which is exact to float64 up to _SERIES_UP_TO, where its closed form begins to be
_KL_SERIES = (
    1 / 8,
    -1 / 576,
    1 / 25_920,
    -1 / 1_075_200,
    1 / 43_545_600,
    -691 * 13 / 12 / 1_307_674_368_000,
    15 / 14 / 74_724_249_600,
)
_SERIES_UP_TO = 0.5


def osc_given(osc: ArrayLike) -> Floats:
    return given("osc", osc, hint="max - min of a drift, as the metric logit_osc_nats")


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def tv_from_osc(osc: ArrayLike) -> Floats:
    """The total variation of two rows is at most tanh(osc / 4).

    Returns:
        Of the same shape, in [0, 1].  Attained by a drift of two levels on tokens of mass
        1 / (1 + e^(osc/2)).

    >>> tv_from_osc(0.125).round(5).item()
    0.03124
    """
    return np.tanh(osc_given(osc) / 4)


@theorem(
    "certificate",
    source=f"W. Hoeffding, JASA 1963, lemma 1 before its last step; {DERIVED}",
    assumes=_ONE_ROW,
    sharp=True,
)
def kl_from_osc(osc: ArrayLike) -> Floats:
    """KL, either way, is at most log((e^osc - 1) / osc) - 1 + osc / (e^osc - 1), under osc^2 / 8.

    Worked as a series near 0, where the closed form has no digit left.

    Returns:
        Of the same shape, nats; inf at inf.

    >>> kl_from_osc([0.01, 1.0]).round(7).tolist()
    [1.25e-05, 0.1233016]
    """
    osc = osc_given(osc)
    small = np.minimum(osc, _SERIES_UP_TO) ** 2
    series = small * np.polynomial.polynomial.polyval(small, _KL_SERIES)
    # above 1e3 the last term is 0 in float64, and inf times 0 would be nothing
    large = np.maximum(osc, _SERIES_UP_TO)
    tail = np.minimum(large, 1e3)
    tail = tail * np.exp(-tail) / -np.expm1(-tail)
    finite = np.where(np.isinf(large), 1.0, large)
    closed = finite - np.log(finite) + np.log(-np.expm1(-finite)) - 1.0 + tail
    return np.where(osc <= _SERIES_UP_TO, series, np.where(np.isinf(osc), np.inf, closed))[()]


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def abs_log_ratio_from_osc(osc: ArrayLike) -> Floats:
    """|log p - log q| is at most osc, for every token.

    >>> abs_log_ratio_from_osc([0.0, 0.125]).tolist()
    [0.0, 0.125]
    """
    return osc_given(osc) * 1.0


@theorem("certificate", sharp=True)
def tv_from_exceedance(rho: ArrayLike, share: ArrayLike) -> Floats:
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
