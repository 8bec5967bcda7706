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
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.registry import Registry
from servanda.theory.bounds.theorem import Floats, given, theorem


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


# The gap of a weighting, D_psi = sum |p - q psi(w)|, from what else is known of two kernels.


_LARGEST_RHO = 700.0  # the gaps have reached their limits long before exp overflows


@theorem("conditional bound", assumes=("every_context", "every_token"), sharp=True)
def weight_gap_from_log_ratio(rho: ArrayLike, psi: Psi) -> Floats:
    """D_psi if |log p - log q| of every token, sampled or not, is at most rho.

    2 tanh(rho / 2) for naive, (e^rho - C)^+ / (1 + e^rho) for tis, and 0 where psi leaves
    every weight in [e^-rho, e^rho] alone.

    Args:
        rho: nats, >= 0.
        psi: a weighting that leaves a weight of 1 alone.

    Raises:
        EvidenceError: rho is negative, or psi changes a weight of 1.

    >>> from servanda.theory.bounds.importance_weights import PSI
    >>> weight_gap_from_log_ratio([0.1, 0.7], PSI["naive"]()).round(4).tolist()
    [0.0999, 0.6728]
    >>> weight_gap_from_log_ratio([0.1, 0.7], PSI["tis"](2.0)).round(4).tolist()
    [0.0, 0.0046]
    """
    rho_N = np.minimum(given("rho", rho), _LARGEST_RHO)
    if psi.weight(np.ones(1))[0] != 1.0:
        raise EvidenceError(
            f"{psi.name!r} does not leave a weight of 1 as it is, so equal kernels have a gap",
            hint="give a cap of at least 1, or a band around 1 such as [0.5, 2.0]",
        )
    # D = E_q h(w), h(w) = |w - psi(w)|, over laws of w on [e^-rho, e^rho] with mean 1.  Between
    # its bends h is convex, so the largest mean puts mass on two points: an end, or the two
    # sides of a bend.
    least_N, most_N = np.exp(-rho_N), np.exp(rho_N)
    for bend in psi.bends:
        log_bend = math.log(bend) if bend > 0 else -math.inf
        # in logs, so that rho = log(cap) ends at the cap to the last bit
        least_N = np.where(log_bend <= -rho_N, np.maximum(least_N, bend), least_N)
        most_N = np.where(log_bend >= rho_N, np.minimum(most_N, bend), most_N)
    sides = [s for b in psi.bends for s in (np.nextafter(b, 0.0), b, np.nextafter(b, math.inf))]
    points_KN = np.stack([least_N, most_N, *(np.clip(side, least_N, most_N) for side in sides)])
    low_KN, high_KN = np.minimum(points_KN, 1.0), np.maximum(points_KN, 1.0)
    return _two_points(low_KN, high_KN, psi)


def _two_points(low_KN: Floats, high_KN: Floats, psi: Psi) -> Floats:
    """The largest E|w - psi(w)| of mean 1 on one low and one high point, [N]."""
    h_low_KN = np.abs(low_KN - psi.weight(low_KN))
    h_high_KN = np.abs(high_KN - psi.weight(high_KN))
    x, h_x = low_KN[:, None], h_low_KN[:, None]
    y, h_y = high_KN[None], h_high_KN[None]
    mean_KKN = np.zeros(np.broadcast_shapes(x.shape, y.shape))
    np.divide((1.0 - x) * h_y + (y - 1.0) * h_x, y - x, out=mean_KKN, where=y > x)
    return mean_KKN.max(axis=(0, 1))[()]


@theorem("certificate", sharp=True)
def weight_gap_from_tv(tv: ArrayLike) -> Floats:
    """The gap of naive weights is twice the total variation.

    Args:
        tv: in [0, 1], of a context or on average over contexts.

    >>> weight_gap_from_tv(0.07).item()
    0.14
    """
    return 2.0 * given("tv", tv, high=1.0)


@theorem("certificate", assumes=("sampler", "same_tokens"), sharp=True)
def missing_mass(mean_capped_weight: ArrayLike, cap: float) -> Floats:
    """The train kernel's mass that the infer kernel cannot sample is at most 1 - E min(w, C).

    Args:
        mean_capped_weight: E_infer min(w, C), or a lower bound of it.
        cap: C > 0; the larger, the less of the drift counts beside what is missing.

    Returns:
        >= 0; a mean above 1, which no pair of kernels has, bounds nothing beyond 0.

    Raises:
        EvidenceError: the mean is negative or larger than the cap.

    >>> missing_mass(0.97, 2.0).round(4).item()
    0.03
    """
    if not cap > 0:
        raise EvidenceError(f"a weight cannot be capped at {cap:g}", hint="such as 2.0")
    return np.maximum(1.0 - given("mean_capped_weight", mean_capped_weight, high=cap), 0.0)
