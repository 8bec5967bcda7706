# Logits: the effect of a drift of one row of logits on the distribution of the next token.
#
# log q/p of token a is drift_a - log E_p e^drift, so only osc = max - min of the drift matters: a
# common shift has no effect.  Each divergence is largest at a drift of two levels, and none is
# attained by a bound in |drift| alone.  Every `osc` here is that of the drift of logits, in nats
# and >= 0.  An osc of inf is allowed: some token then has mass on one side only, and the bounds
# remain valid.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.bounds.domain import Floats, given
from servanda.theory.bounds.theorem import DERIVED, theorem

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
_EXP_UP_TO = 700.0  # e^700 is still a float64


def _osc(osc: ArrayLike) -> Floats:
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
    return np.tanh(_osc(osc) / 4)


@theorem(
    "certificate",
    source=f"W. Hoeffding, JASA 1963, lemma 1 before its last step; {DERIVED}",
    assumes=_ONE_ROW,
    sharp=True,
)
def kl_from_osc(osc: ArrayLike) -> Floats:
    """KL, both ways, is at most log((e^osc - 1) / osc) - 1 + osc / (e^osc - 1), under osc^2 / 8.

    Computed by a series near 0, where the closed form loses all digits.

    Returns:
        Of the same shape, nats; inf at inf.

    >>> kl_from_osc([0.01, 1.0]).round(7).tolist()
    [1.25e-05, 0.1233016]
    """
    osc = _osc(osc)
    small = np.minimum(osc, _SERIES_UP_TO) ** 2
    series = small * np.polynomial.polynomial.polyval(small, _KL_SERIES)
    # above 1e3 the last term is 0 in float64, and inf times 0 would be NaN
    large = np.maximum(osc, _SERIES_UP_TO)
    tail = np.minimum(large, 1e3)
    tail = tail * np.exp(-tail) / -np.expm1(-tail)
    finite = np.where(np.isinf(large), 1.0, large)
    closed = finite - np.log(finite) + np.log(-np.expm1(-finite)) - 1.0 + tail
    return np.where(osc <= _SERIES_UP_TO, series, np.where(np.isinf(osc), np.inf, closed))[()]


@theorem(
    "certificate", source=f"the Kantorovich inequality; {DERIVED}", assumes=_ONE_ROW, sharp=True
)
def chi2_from_osc(osc: ArrayLike) -> Floats:
    """Chi^2, both ways, is at most sinh^2(osc / 2).

    Returns:
        Of the same shape; inf on overflow.

    >>> chi2_from_osc(0.1).round(6).item()
    0.002502
    """
    with np.errstate(over="ignore"):
        return np.sinh(_osc(osc) / 2) ** 2


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def hellinger2_from_osc(osc: ArrayLike) -> Floats:
    """The squared Hellinger distance 1 - sum sqrt(p q) is at most 1 - sech(osc / 4).

    Returns:
        Of the same shape, in [0, 1].

    >>> hellinger2_from_osc(1.0).round(6).item()
    0.030456
    """
    quarter = _osc(osc) / 4
    # (1 - e^-x)^2 / (1 + e^-2x) is 1 - sech x, without cancellation
    return np.expm1(-quarter) ** 2 / (1.0 + np.exp(-2 * quarter))


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def abs_log_ratio_from_osc(osc: ArrayLike) -> Floats:
    """|log p - log q| is at most osc, for every token.

    `log_ratio_bounds` is tighter for a token whose probability is known.

    >>> abs_log_ratio_from_osc([0.0, 0.125]).tolist()
    [0.0, 0.125]
    """
    return _osc(osc) * 1.0


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def log_ratio_bounds(logp: ArrayLike, osc: ArrayLike, log1mp: ArrayLike) -> tuple[Floats, Floats]:
    """Log q - log p of a token lies between -log(p + (1-p) e^osc) and -log(p + (1-p) e^-osc).

    In the other direction it is the range of log p - log q for a token of infer probability p.

    Args:
        logp: logprob of the token under train, nats, <= 0.
        osc: osc of the logit drift, nats, >= 0.
        log1mp: log(1 - p), nats, from the OTHER tokens (the logsumexp of their logprobs):
            1 - e^logp loses all digits if p is near 1.

    Returns:
        (low, high), each of their common shape, nats: low <= 0 <= high.

    >>> low, high = log_ratio_bounds(np.log(0.9), 1.0, np.log(0.1))
    >>> low.round(3).item(), high.round(3).item()
    (-0.159, 0.065)
    """
    hint = "logprobs of the processed row, in nats"
    logp = given("logp", logp, -np.inf, 0.0, hint=hint)
    log1mp = given("log1mp", log1mp, -np.inf, 0.0, hint=hint)
    osc = _osc(osc)
    rest = np.exp(log1mp)

    def log_mean(drift: Floats) -> Floats:
        """log(p + (1-p) e^drift): by log1p near 0, otherwise in logs."""
        part = rest * np.expm1(np.minimum(drift, _EXP_UP_TO))
        near = (np.abs(part) < 0.5) & (drift <= _EXP_UP_TO)
        with np.errstate(invalid="ignore"):
            far = np.logaddexp(logp, log1mp + drift)
        # an empty rest still counts under an infinite drift
        far = np.where(np.isposinf(drift), np.inf, far)
        return np.where(near, np.log1p(np.where(near, part, 0.0)), far)[()]

    return 0.0 - log_mean(osc), 0.0 - log_mean(-osc)


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def tv_from_osc_pmax(osc: ArrayLike, rest: ArrayLike) -> Floats:
    """The total variation, if one token has mass 1 - rest, is at most f(min(s, rest)).

    f(x) = x (1-x) (e^osc - 1) / (1 + x (e^osc - 1)) is the most that a set of mass x can
    gain, and largest, at tanh(osc / 4), for s = 1 / (1 + e^(osc/2)).  Near 0 it is about
    osc p_max (1 - p_max).

    Args:
        osc: osc of the logit drift, nats, >= 0.
        rest: 1 - p_max of either kernel, summed over the OTHER tokens: 1 - p_max itself
            loses all digits if p_max is near 1.

    Returns:
        Of their common shape, at most tv_from_osc(osc).

    >>> tv_from_osc_pmax(2 * 0.0625, 0.01).round(4).item()
    0.0013
    """
    osc = _osc(osc)
    rest = given("rest", rest, 0.0, 1.0, hint="rest is 1 - p_max")
    back = np.exp(-osc / 2)
    binds = (rest > 0.0) & (rest < back / (1.0 + back))
    x = np.where(binds, rest, 1.0)  # if it does not bind, any x is valid
    gain = x * (1.0 - x) * -np.expm1(-osc) / (np.exp(-osc) - x * np.expm1(-osc))
    nothing = (rest == 0.0) & np.isfinite(osc)
    return np.where(binds, gain, np.where(nothing, 0.0, np.tanh(osc / 4)))[()]


@theorem("conditional bound", assumes=("same_filters", "every_token"), sharp=True)
def tv_from_log_ratio(rho: ArrayLike) -> Floats:
    """The total variation is at most tanh(rho / 2) if every |log p - log q| is within rho.

    For every token, sampled or not: the maximum over sampled tokens is not sufficient.

    Args:
        rho: nats, >= 0; any shape.

    Returns:
        Of the same shape, in [0, 1].

    >>> tv_from_log_ratio(0.1).round(5).item()
    0.04996
    """
    return np.tanh(given("rho", rho) / 2)


@theorem("certificate", sharp=True)
def tv_from_exceedance(rho: ArrayLike, share: ArrayLike) -> Floats:
    """If all but a share s of tokens have |log p - log q| <= rho, TV <= s + (1-s)(1 - e^-rho).

    Tokens of infer beyond rho may lose all their mass under train, the others a factor of e^-rho.
    It also holds on average over contexts: it is linear in the share.

    Args:
        rho: nats, >= 0.
        share: share of the tokens sampled by infer, in [0, 1].

    >>> tv_from_exceedance(0.2, 0.01).round(4).item()
    0.1895
    """
    share = given("share", share, high=1.0)
    return share - (1.0 - share) * np.expm1(-given("rho", rho))
