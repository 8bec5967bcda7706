# Weightings: how a trainer corrects for tokens that another kernel drew, and what is left.
#
# A trainer weighs each token by psi(w), w = p / q.  Whatever psi is, the bias of its gradient
# at a context is at most advantage x score norm x D_psi, with
#
#     D_psi = sum over tokens of |p - q psi(w)|  =  E_infer g(w),
#     g(w)  = (psi - w)^+ - min(w, psi) + 1.
#
# The identity needs no support assumption: p-mass that infer cannot draw makes E_infer w fall
# below 1, and g counts it.  g is bounded where psi is, so its mean can be certified from the
# logprobs of sampled tokens.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.registry import Registry
from servanda.theory.bounds.domain import Floats
from servanda.theory.bounds.theorem import theorem


@dataclass(frozen=True)
class Psi:
    """A weighting psi(w) >= 0 and the span of its gap.

    Args:
        name: as a contract writes it.
        weight: psi of importance weights [N], which may be inf, to [N].
        largest: sup psi; inf where it has none, and no sample can then bound the gap.
        span: smallest and largest g(w).
        bends: where psi bends or jumps; between them it is a straight line.
    """

    name: str
    weight: Callable[[Floats], NDArray[np.floating]]
    largest: float
    span: tuple[float, float]
    bends: tuple[float, ...] = ()


PSI: Registry[Callable[..., Psi]] = Registry("weighting")


@PSI.register("naive")
def naive() -> Psi:
    """psi = 1: no correction; D = 2 TV."""
    return Psi("naive", np.ones_like, 1.0, (0.0, 2.0))


@PSI.register("is")
def importance() -> Psi:
    """psi = w: D is the mass that infer cannot draw; unbounded, so no sample certifies it."""
    return Psi("is", lambda w_N: w_N, math.inf, (-math.inf, 1.0))


@PSI.register("tis")
def truncated(cap: float) -> Psi:
    """psi = min(w, cap): D = E_p (1 - cap/w)^+ and the mass that infer cannot draw."""
    return Psi("tis", lambda w_N: np.minimum(w_N, cap), cap, (1.0 - cap, 1.0), (cap,))


def _inside(band: tuple[float, float]) -> Callable[[Floats], Floats]:
    low, high = band
    return lambda w_N: np.where((w_N >= low) & (w_N <= high), w_N, 0.0)


@PSI.register("mis")
def masked(band: tuple[float, float]) -> Psi:
    """psi = w inside the band, else 0: D is train's mass outside it."""
    return Psi("mis", _inside(band), band[1], (1.0 - band[1], 1.0), band)


@PSI.register("icepop")
def icepop(band: tuple[float, float]) -> Psi:
    """IcePop: the token-level mask, the same function as mis."""
    return Psi("icepop", _inside(band), band[1], (1.0 - band[1], 1.0), band)


@PSI.register("reject")
def rejected(band: tuple[float, float]) -> Psi:
    """psi = 1 inside the band, else 0; the divisor counts all tokens."""
    low, high = band
    return Psi("reject", lambda w_N: ((w_N >= low) & (w_N <= high)) * 1.0, 1.0, (0.0, 2.0), band)


@PSI.register("clip")
def clipped(c: float) -> Psi:
    """psi = w cut to [1 - c, 1 + c]; c = 0 is naive, and D falls as c grows."""
    low, high = max(1.0 - c, 0.0), 1.0 + c
    # g is 1 - 2w + psi below the band, 1 - psi in it and above; -c is another float than 1 - high
    span = (1.0 - high, 1.0 + low)
    return Psi("clip", lambda w_N: np.clip(w_N, low, high), high, span, (low, high))


@theorem("certificate", assumes=("sampler", "same_tokens"), sharp=True)
def weight_gap(log_ratio_N: Floats, psi: Psi) -> Floats:
    """E_infer g(w) is the gap D_psi = sum |p - q psi(w)| that the weighting leaves.

    Args:
        log_ratio_N: log p - log q of the sampled tokens, nats; -inf where train gives no mass,
            NaN where a token is unusable.

    Returns:
        [N], within psi.span; unbiased, though a single value may be negative.  NaN stays NaN.

    Raises:
        EvidenceError: a log ratio is +inf: what was drawn had mass.

    >>> weight_gap(np.log([0.5, 1.0, 4.0]), truncated(2.0)).tolist()
    [0.5, 0.0, -1.0]
    """
    log_ratio_N = np.asarray(log_ratio_N, dtype=np.float64)
    if np.isposinf(log_ratio_N).any():
        raise EvidenceError(
            "what was sampled has no usable log ratio",
            hint="drop sequences with unusable tokens as missing first",
        )
    with np.errstate(over="ignore"):
        w_N = np.exp(log_ratio_N)
    return gap(w_N, np.asarray(psi.weight(w_N), dtype=np.float64))


def gap(w_N: Floats, psi_N: Floats) -> Floats:
    """g of importance weights and of what a trainer uses in their place, [N].

    Its mean over infer's samples is sum |p - q psi|, or an upper bound where psi depends on more
    than w: E|w - psi|, and the mass that infer cannot draw.

    >>> gap(np.array([0.5, 4.0]), np.array([1.0, 2.0])).tolist()
    [1.0, -1.0]
    """
    small_N = np.minimum(psi_N, w_N)
    # a weight beyond float64 that psi leaves alone has no excess, and inf - inf is no number
    excess_N = np.subtract(psi_N, small_N, out=np.zeros_like(psi_N), where=psi_N > small_N)
    return excess_N - small_N + 1.0
