# A drift of one row of logits and the next token: theorems that no verdict uses.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.bounds.drift import osc_given
from servanda.theory.bounds.theorem import DERIVED, Floats, given, theorem

_ONE_ROW = ("same_filters",)
_EXP_UP_TO = 700.0  # e^700 is a float64 yet


@theorem(
    "certificate", source=f"the Kantorovich inequality; {DERIVED}", assumes=_ONE_ROW, sharp=True
)
def chi2_from_osc(osc: ArrayLike) -> Floats:
    """Chi^2, either way, is at most sinh^2(osc / 2).

    Returns:
        Of the same shape; inf where float64 ends.

    >>> chi2_from_osc(0.1).round(6).item()
    0.002502
    """
    with np.errstate(over="ignore"):
        return np.sinh(osc_given(osc) / 2) ** 2


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def hellinger2_from_osc(osc: ArrayLike) -> Floats:
    """The squared Hellinger distance 1 - sum sqrt(p q) is at most 1 - sech(osc / 4).

    Returns:
        Of the same shape, in [0, 1].

    >>> hellinger2_from_osc(1.0).round(6).item()
    0.030456
    """
    quarter = osc_given(osc) / 4
    # (1 - e^-x)^2 / (1 + e^-2x) is 1 - sech x, and cancels nowhere
    return np.expm1(-quarter) ** 2 / (1.0 + np.exp(-2 * quarter))


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def log_ratio_bounds(logp: ArrayLike, osc: ArrayLike, log1mp: ArrayLike) -> tuple[Floats, Floats]:
    """Log q - log p of a token is between -log(p + (1-p) e^osc) and -log(p + (1-p) e^-osc).

    The other way round it is the range of log p - log q for a token of infer probability p.

    Args:
        logp: of the token under train, nats, <= 0.
        osc: of the logit drift, nats, >= 0.
        log1mp: log(1 - p), nats, from the OTHER tokens (the logsumexp of their logprobs):
            1 - e^logp loses every digit where p is near 1.

    Returns:
        (low, high), each of their common shape, nats: low <= 0 <= high.

    >>> low, high = log_ratio_bounds(np.log(0.9), 1.0, np.log(0.1))
    >>> low.round(3).item(), high.round(3).item()
    (-0.159, 0.065)
    """
    hint = "logprobs of the processed row, in nats"
    logp = given("logp", logp, -np.inf, 0.0, hint=hint)
    log1mp = given("log1mp", log1mp, -np.inf, 0.0, hint=hint)
    osc = osc_given(osc)
    rest = np.exp(log1mp)

    def log_mean(drift: Floats) -> Floats:
        """log(p + (1-p) e^drift): through log1p while it is near 0, else in logs."""
        part = rest * np.expm1(np.minimum(drift, _EXP_UP_TO))
        near = (np.abs(part) < 0.5) & (drift <= _EXP_UP_TO)
        with np.errstate(invalid="ignore"):
            far = np.logaddexp(logp, log1mp + drift)
        # a rest of nothing still counts under a drift without end
        far = np.where(np.isposinf(drift), np.inf, far)
        return np.where(near, np.log1p(np.where(near, part, 0.0)), far)[()]

    return 0.0 - log_mean(osc), 0.0 - log_mean(-osc)


@theorem("certificate", assumes=_ONE_ROW, sharp=True)
def tv_from_osc_pmax(osc: ArrayLike, rest: ArrayLike) -> Floats:
    """The total variation, where one token has mass 1 - rest, is at most f(min(s, rest)).

    f(x) = x (1-x) (e^osc - 1) / (1 + x (e^osc - 1)) is the most that a set of mass x can
    gain, and largest, at tanh(osc / 4), for s = 1 / (1 + e^(osc/2)).  Near 0 it is about
    osc p_max (1 - p_max).

    Args:
        osc: of the logit drift, nats, >= 0.
        rest: 1 - p_max of either kernel, summed over the OTHER tokens: 1 - p_max itself
            loses every digit where p_max is near 1.

    Returns:
        Of their common shape, at most tv_from_osc(osc).

    >>> tv_from_osc_pmax(2 * 0.0625, 0.01).round(4).item()
    0.0013
    """
    osc = osc_given(osc)
    rest = given("rest", rest, 0.0, 1.0, hint="rest is 1 - p_max")
    back = np.exp(-osc / 2)
    binds = (rest > 0.0) & (rest < back / (1.0 + back))
    x = np.where(binds, rest, 1.0)  # where it does not bind any x will do
    gain = x * (1.0 - x) * -np.expm1(-osc) / (np.exp(-osc) - x * np.expm1(-osc))
    nothing = (rest == 0.0) & np.isfinite(osc)
    return np.where(binds, gain, np.where(nothing, 0.0, np.tanh(osc / 4)))[()]


@theorem("conditional bound", assumes=("same_filters", "every_token"), sharp=True)
def tv_from_log_ratio(rho: ArrayLike) -> Floats:
    """The total variation is at most tanh(rho / 2) if every |log p - log q| is at most rho.

    Of every token, drawn or not: a largest value over sampled tokens does not give it.

    Args:
        rho: nats, >= 0; any shape.

    Returns:
        Of the same shape, in [0, 1].

    >>> tv_from_log_ratio(0.1).round(5).item()
    0.04996
    """
    return np.tanh(given("rho", rho) / 2)
