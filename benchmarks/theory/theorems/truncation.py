# Truncation: what top-k, top-p and min-p may keep once the logits drift.
#
# A filter is not continuous: with p = (.5, .3, .2) and top_p just under .8, an osc of 1e-6
# changes the kept set and makes a total variation of .2.  So the kept set is bounded from
# both sides.  The filters are composed in the order of servanda.theory.sampling (top-k, top-p on
# what top-k leaves, min-p): what each would keep alone says nothing of what all keep.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.theory.bounds.theorem import Floats, given, theorem
from servanda.theory.sampling import Sampling, processed_logprobs

Bools = NDArray[np.bool_]
_NONE = "None is no filter"

# what rounding might decide, of sums over a vocabulary and of logits, is not called sure
_MASS_SLACK = 1e-10
_LOGIT_SLACK = 1e-12


@dataclass(frozen=True)
class KeptSets:
    """What a chain of filters keeps of one row, and of every row within an osc of it, [V].

    Args:
        kept: by this row.
        sure: by every such row.
        possible: by some such row, as far as is known: sure <= kept <= possible.
    """

    kept: Bools
    sure: Bools
    possible: Bools


def _sampling(top_k: int | None, top_p: float | None, min_p: float | None) -> Sampling:
    if top_k is not None and not (isinstance(top_k, (int, np.integer)) and top_k >= 1):
        raise EvidenceError(f"top_k is {top_k!r}, and must be a whole number above 0", hint=_NONE)
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise EvidenceError(f"top_p is {top_p:g}, outside of (0, 1]", hint=_NONE)
    if min_p is not None and not 0.0 <= min_p < 1.0:
        raise EvidenceError(f"min_p is {min_p:g}, outside of [0, 1)", hint=_NONE)
    return Sampling(
        temperature=1.0,
        top_k=None if top_k is None else int(top_k),
        top_p=1.0 if top_p is None else float(top_p),
        min_p=0.0 if min_p is None else float(min_p),
    )


def _row(logits_V: ArrayLike) -> Floats:
    row_V = np.asarray(logits_V, dtype=np.float64)
    if row_V.ndim != 1:
        found = f"logits of shape {row_V.shape}: one row [V] at a time"
        raise EvidenceError(found, hint="call it for each row")
    if np.isnan(row_V).any() or np.isposinf(row_V).any():
        raise EvidenceError("a logit is NaN or +inf", hint="-inf alone has a meaning: no mass")
    if not np.isfinite(row_V).any():
        found = "a row of logits gives no token any mass"
        raise EvidenceError(found, hint="drop positions without a usable row")
    return row_V


@theorem("certificate", sharp=True)
def truncation_sets(
    logits_V: ArrayLike,
    osc: float,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> KeptSets:
    """The tokens that filters keep in every row within osc of this one, and in at least one.

    Exact up to rounding for top-k and top-p together and for each filter alone; with min-p
    beside another one `possible` may be too large.

    Args:
        logits_V: of either kernel, after the temperature, [V], nats; -inf without mass.
        osc: of the logit drift after the temperature, nats, >= 0.  0 is the same row; at inf
            nothing is sure and everything possible.
        top_k: how many of the likeliest tokens are kept; None for all.
        top_p: a token is kept while the mass before it is below this; None or 1 for all.
        min_p: the least probability, as a share of the largest; None or 0 for none.

    Raises:
        EvidenceError: no usable row, or a number outside its range.

    >>> truncation_sets(np.log([0.5, 0.3, 0.2]), 1e-6, top_p=0.7999999).sure.tolist()
    [True, True, False]
    >>> truncation_sets(np.log([0.5, 0.3, 0.2]), 1e-6, top_p=0.7999999).possible.tolist()
    [True, True, True]
    """
    row_V, sampling = _row(logits_V), _sampling(top_k, top_p, min_p)
    drift = float(given("osc", osc))
    kept_V = np.isfinite(processed_logprobs(row_V[None], sampling))[0]
    if drift == 0.0:
        return KeptSets(kept_V, kept_V.copy(), kept_V.copy())
    if math.isinf(drift):
        return KeptSets(kept_V, np.zeros_like(kept_V), np.ones_like(kept_V))
    order_V = np.argsort(-row_V, kind="stable")
    order_M = order_V[: np.isfinite(row_V).sum()]
    sure_M, possible_M = _sorted_sets(row_V[order_M], drift, sampling)
    sure_V, possible_V = np.zeros_like(kept_V), np.zeros_like(kept_V)
    sure_V[order_M], possible_V[order_M] = sure_M, possible_M
    return KeptSets(kept_V, sure_V, possible_V)


def _sorted_sets(z_M: Floats, osc: float, sampling: Sampling) -> tuple[Bools, Bools]:
    """(sure, possible) of tokens that have mass, the likeliest first."""
    size = len(z_M)
    # each token by its own size: a mask of -1e30 must not blur the others
    osc_M = osc + _LOGIT_SLACK * (osc + 1.0 + np.abs(z_M) + np.abs(z_M[0]))
    index_M = np.arange(size)
    # how many stand before a token, itself counted, at worst; how many at best
    worst_M = np.searchsorted(-z_M, osc_M - z_M, side="right")
    best_M = np.searchsorted(-z_M, -osc_M - z_M, side="left")
    k = min(sampling.top_k or size, size)
    sure_M, possible_M = worst_M <= k, best_M < k
    if sampling.top_p < 1.0:
        mass_M = np.exp(z_M - z_M[0])
        before = np.concatenate([[0.0], mass_M.cumsum()])
        after = np.concatenate([mass_M[::-1].cumsum()[::-1], [0.0]])
        # at worst all that may stand before it rise, and the rest of the k best stay behind
        ahead_M = before[index_M] + (after[index_M + 1] - after[worst_M])
        behind_M = mass_M + after[worst_M] - after[np.maximum(worst_M, k)]
        share_M = _share(ahead_M, behind_M, -osc_M)
        sure_M &= share_M < sampling.top_p - _MASS_SLACK
        # at best it rises with all that then need not stand before it, each up to its level
        level_M = np.clip(k, best_M, index_M + 1) - best_M
        behind_M = level_M * mass_M + after[index_M + 1] - after[np.maximum(index_M + 1, k)]
        share_M = _share(before[best_M], behind_M, osc_M)
        possible_M &= (share_M < sampling.top_p + _MASS_SLACK) | (mass_M == 0.0)
    if sampling.min_p > 0.0:
        rival_M = np.where(index_M > 0, z_M[0], z_M[1] if size > 1 else -np.inf)
        sure_M &= z_M - rival_M - osc_M >= math.log(sampling.min_p)
        possible_M &= z_M - z_M[0] + osc_M >= math.log(sampling.min_p)
    return sure_M, possible_M


def _share(ahead_M: Floats, behind_M: Floats, drift_M: Floats) -> Floats:
    """Share of the mass ahead, once what is behind has drifted by so much."""
    # the side that falls is scaled, so that nothing overflows
    ahead_M = ahead_M * np.exp(np.minimum(0.0, -drift_M))
    behind_M = behind_M * np.exp(np.minimum(0.0, drift_M))
    total_M = ahead_M + behind_M
    return np.where(total_M > 0.0, ahead_M / np.where(total_M > 0.0, total_M, 1.0), 0.0)


@theorem("certificate", sharp=True)
def tv_truncated_interval(
    alpha: ArrayLike, beta: ArrayLike, tv_common: ArrayLike
) -> tuple[Floats, Floats]:
    """The total variation of truncated rows is in [m, m + (1-m) tv_common], m = max(alpha, beta).

    Args:
        alpha: train's mass, after its filters, on tokens that only train keeps.
        beta: infer's mass, after its filters, on tokens that only infer keeps.
        tv_common: of the two rows renormalised on the tokens that both keep, or an upper
            bound of it, such as tv_from_osc of the drift on them.

    Returns:
        (low, high), each of their common shape.  alpha > 0 makes both KL and chi^2 of train
        from infer inf, and leaves importance weights a bias that no weighting takes away.

    >>> low, high = tv_truncated_interval(0.2, 0.0, 0.5)
    >>> low.item(), high.round(3).item()
    (0.2, 0.6)
    """
    only = np.maximum(given("alpha", alpha, 0.0, 1.0), given("beta", beta, 0.0, 1.0))
    common = given("tv_common", tv_common, 0.0, 1.0)
    return only + np.zeros_like(common), only + (1.0 - only) * common
