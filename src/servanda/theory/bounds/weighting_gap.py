# The gap of a weighting, D_psi = sum |p - q psi(w)|, from other bounds on two kernels.

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.domain import Floats, given
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.bounds.theorem import theorem

_LARGEST_RHO = 700.0  # the gaps reach their limits long before exp overflows


@theorem("conditional bound", assumes=("every_context", "every_token"), sharp=True)
def weight_gap_from_log_ratio(rho: ArrayLike, psi: Psi) -> Floats:
    """D_psi if no |log-ratio| of any token, sampled or not, exceeds rho.

    2 tanh(rho / 2) for naive, (e^rho - C)^+ / (1 + e^rho) for tis, and 0 if psi does not change
    weights in [e^-rho, e^rho].

    Args:
        rho: nats, >= 0.
        psi: a weighting that does not change a weight of 1.

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
    # D = E_q h(w), h(w) = |w - psi(w)|, over distributions of w on [e^-rho, e^rho] with mean 1.
    # Between its bends h is convex, so the largest mean puts mass on two points: an end, or the two
    # sides of a bend.
    least_N, most_N = np.exp(-rho_N), np.exp(rho_N)
    for bend in psi.bends:
        log_bend = math.log(bend) if bend > 0 else -math.inf
        # in logs, so that rho = log(cap) gives the cap exactly
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


@theorem("estimate", sharp=True)
def tis_gap_from_chi2(chi2: ArrayLike, cap: ArrayLike) -> Floats:
    """The gap of weights truncated at C is at most (sqrt(chi2 + (C-1)^2) - (C-1)) / 2.

    D = E_q (w - C)^+ = (1 - C + E_q|w - C|) / 2, and Cauchy-Schwarz.  It is concave in chi2,
    so a mean of chi2 over contexts bounds the mean of the gap.

    Args:
        chi2: chi2(train || infer) = E_infer (w - 1)^2; inf if infer cannot sample some token.
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


@theorem("certificate", assumes=("sampler", "same_tokens"), sharp=True)
def missing_mass(mean_capped_weight: ArrayLike, cap: float) -> Floats:
    """The train mass that infer cannot sample is at most 1 - E min(w, C).

    Args:
        mean_capped_weight: E_infer min(w, C), or a lower bound of it.
        cap: C > 0; the larger, the less of the drift counts in addition to the missing mass.

    Returns:
        >= 0; a mean above 1, which is impossible for two kernels, gives 0.

    Raises:
        EvidenceError: the mean is negative or larger than the cap.

    >>> missing_mass(0.97, 2.0).round(4).item()
    0.03
    """
    if not cap > 0:
        raise EvidenceError(f"a weight cannot be capped at {cap:g}", hint="such as 2.0")
    return np.maximum(1.0 - given("mean_capped_weight", mean_capped_weight, high=cap), 0.0)
