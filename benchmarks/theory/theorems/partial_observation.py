# Partial observations: what a few tokens of a row, or a number that a trainer logs, still say.
#
# The means that trainers log are of tokens that infer drew.  A mean over answers, each with
# its own mean, is no mean over tokens where lengths differ, and bounds nothing here.

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.bounds.sequence import shortfall
from servanda.theory.bounds.theorem import Floats, given, log_ratios, theorem
from servanda.theory.divergence.topk_rows import TopK

_SAMPLED = ("sampler", "same_tokens")


@theorem(
    "certificate", source="Rao-Blackwell, on the returned tokens", assumes=_SAMPLED, sharp=True
)
def tv_rao_blackwell(
    logp_train_NK: ArrayLike,
    logp_infer_NK: ArrayLike,
    log_ratio_N: ArrayLike,
    among_N: ArrayLike,
) -> Floats:
    """Its E_infer is TV, as that of (1 - w)^+, and its variance is never larger.

    A token among those that infer returned stands for all of them: their (q - p)^+ over
    their mass.  Any other stands for itself.

    Args:
        logp_train_NK, logp_infer_NK: of infer's returned tokens at each position, gathered on
            both sides, [N, K], nats; -inf on infer fills a row that has fewer.  Which tokens
            they are must not depend on what was drawn: leave out a sampled token that an
            engine appends to its top k.
        log_ratio_N: log p - log q of the sampled token, [N]; not read where it is among them.
        among_N: whether the sampled token is one of them, [N].

    Returns:
        [N], each in [0, 1].

    Raises:
        EvidenceError: shapes differ, the tokens of a row have more mass than 1, or a token
            that was drawn from them met an empty row; an unusable log ratio.

    >>> train, infer = np.log([[0.4, 0.4]]), np.log([[0.6, 0.3]])
    >>> tv_rao_blackwell(train, infer, [0.0], [True]).round(3).tolist()
    [0.222]
    """
    train_NK = np.asarray(logp_train_NK, dtype=np.float64)
    infer_NK = np.asarray(logp_infer_NK, dtype=np.float64)
    among_N = np.asarray(among_N, dtype=bool)
    alone_N = log_ratios(np.where(among_N, 0.0, log_ratio_N))
    if train_NK.shape != infer_NK.shape or train_NK.shape[:-1] != among_N.shape:
        raise EvidenceError(
            f"{train_NK.shape} train logprobs and {infer_NK.shape} infer logprobs of returned "
            f"tokens for {among_N.shape} sampled tokens",
            hint="gather train at infer's ids: both are [tokens, k]",
        )
    known_NK = ~np.isneginf(infer_NK)
    q_NK = np.where(known_NK, np.exp(infer_NK), 0.0)
    mass_N = q_NK.sum(axis=-1)
    if not (mass_N <= 1 + 1e-3).all() or np.isnan(train_NK[known_NK]).any():
        raise EvidenceError(
            "the returned tokens of a row are no part of a distribution",
            hint="give the logprobs of the distribution that was sampled, each token once",
        )
    if (among_N & (mass_N == 0)).any():
        raise EvidenceError(
            "a sampled token is among the returned ones, and none was returned",
            hint="among says whether the sampled token is in its row of returned ones",
        )
    drift_NK = np.where(known_NK, train_NK, 0.0) - np.where(known_NK, infer_NK, 0.0)
    lost_N = (q_NK * shortfall(drift_NK)).sum(axis=-1)
    shared_N = np.divide(lost_N, mass_N, out=np.zeros_like(lost_N), where=mass_N > 0)
    return np.where(among_N, np.minimum(shared_N, 1.0), shortfall(alone_N))


@theorem("fact", assumes=("true_top_k",), sharp=True)
def tv_interval_full(logp_train_RV: ArrayLike, infer: TopK) -> Floats:
    """The interval of the TV, from whole rows of the train kernel and the infer kernel's top-k.

    What infer did not return has the mass of its tail, and no token of it more than the least
    that was returned.  The lower end lays it where train has most, the upper where it has
    least; both are attained.

    Args:
        logp_train_RV: of the whole vocabulary, [R, V], nats.
        infer: its likeliest tokens at the same positions.

    Returns:
        [lower, upper], [R, 2]; NaN where a row is unusable.

    Raises:
        EvidenceError: the sides have unequal numbers of rows, or another vocabulary.

    >>> some = TopK([[0]], np.log([[0.5]]), vocabulary=3)
    >>> tv_interval_full(np.log([[0.6, 0.3, 0.1]]), some).round(6).tolist()
    [[0.1, 0.4]]
    """
    p_RV = np.exp(np.asarray(logp_train_RV, dtype=np.float64))
    rows, size = p_RV.shape
    if rows != len(infer.ids_RK) or infer.vocabulary not in (None, size):
        raise EvidenceError(
            f"{rows} train rows of {size} tokens for {len(infer.ids_RK)} infer rows of "
            f"{infer.vocabulary}",
            hint="give whole rows of train at infer's positions",
        )
    if (largest := int(infer.ids_RK.max(initial=-1))) >= size:
        raise EvidenceError(
            f"token id {largest} in train rows of {size} tokens",
            hint="give whole rows of train, padded ids included",
        )
    q_RV, returned_RV = np.zeros((rows, size)), np.zeros((rows, size), dtype=bool)
    row_M, at_M = np.nonzero(infer.known_RK)
    q_RV[row_M, infer.ids_RK[row_M, at_M]] = infer.p_RK[row_M, at_M]
    returned_RV[row_M, infer.ids_RK[row_M, at_M]] = True
    overlap_R = np.minimum(p_RV, q_RV).sum(axis=-1)
    # of what was not returned: train's probabilities, the smallest first, and infer's cap
    free_RV = np.sort(np.where(returned_RV, np.inf, p_RV), axis=-1)
    capped_RV = np.minimum(np.where(np.isinf(free_RV), 0.0, free_RV), infer.least_R1)
    tail_R = infer.tail_R
    most_R = np.minimum(tail_R, capped_RV.sum(axis=-1))
    # whole tokens at the cap, then one with what remains; a tail that may be smaller is
    least_tail_R1 = np.maximum(tail_R - 2 * infer.slack, 0.0)[:, None]
    with np.errstate(invalid="ignore"):  # a row that returned nothing has no cap
        before_RV = np.arange(size) * infer.least_R1
        filled_RV = np.clip(least_tail_R1 - before_RV, 0.0, infer.least_R1)
    least_R = np.minimum(capped_RV, filled_RV).sum(axis=-1)
    ends_R2 = 1.0 - np.stack([overlap_R + most_R, overlap_R + np.minimum(least_R, most_R)], axis=-1)
    return np.where(infer.usable_R[:, None], np.clip(ends_R2, 0.0, 1.0), np.nan)


@theorem("estimate", source="1 - w <= -log w", assumes=_SAMPLED, sharp=True)
def tv_from_mean_abs_log_ratio(
    mean_abs_log_ratio: ArrayLike, kl: ArrayLike | None = None
) -> Floats:
    """TV is at most E_infer |log w|, and at most (E_infer |log w| + KL(infer || train)) / 2.

    Args:
        mean_abs_log_ratio: mean over tokens, nats; inf where train gives one no mass.
        kl: KL(infer || train) of the same tokens, nats, where it is known: the sharper half.

    >>> float(tv_from_mean_abs_log_ratio(0.011)), float(tv_from_mean_abs_log_ratio(0.011, 0.0006))
    (0.011, 0.0058)
    """
    most = given("mean_abs_log_ratio", mean_abs_log_ratio)
    if kl is not None:
        most = np.minimum(most, (most + given("kl", kl)) / 2.0)
    return np.minimum(most, 1.0)


@theorem("estimate", assumes=(*_SAMPLED, "support"), sharp=True)
def tv_from_mult_prob_error(mult_prob_error: ArrayLike) -> Floats:
    """TV is at most (E_infer exp |log w| - 1) / 2.

    The excess over 1 is that of w where it is above 1, and of 1 / w where it is below: each
    at least a TV.

    Args:
        mult_prob_error: mean over tokens of exp |log w|, >= 1.

    >>> round(float(tv_from_mult_prob_error(1.05)), 6)
    0.025
    """
    hint = "it is a mean of ratios, 1 where the kernels agree"
    error = given("mult_prob_error", mult_prob_error, 1.0, hint=hint)
    return np.minimum((error - 1.0) / 2.0, 1.0)


@theorem("certificate", source="the event of one token", assumes=_SAMPLED, sharp=True)
def tv_at_least_probs_diff(mean_probs_diff: ArrayLike) -> Floats:
    """TV is at least E_infer |p - q| of the sampled token, which gives no upper bound.

    Args:
        mean_probs_diff: mean over tokens of the absolute difference of probabilities.

    >>> float(tv_at_least_probs_diff(0.004))
    0.004
    """
    return given("mean_probs_diff", mean_probs_diff, high=1.0)


@theorem(
    "estimate",
    source="M2PO, arXiv 2510.01161, with the sharp factor",
    assumes=(*_SAMPLED, "support"),
    sharp=True,
)
def chi2_from_second_moment(second_moment: ArrayLike, largest: ArrayLike) -> Floats:
    """Chi^2(train || infer) is at most ((R - 1) / log R)^2 E_infer (log w)^2 where w <= R.

    (w - 1) / log w grows with w.  The factor is below R^2, with which M2PO (arXiv 2510.01161)
    states it, and tends to 1 as R does.

    Args:
        second_moment: mean over tokens of (log w)^2, square nats.
        largest: R, of the weights of all tokens that infer can draw; >= 1.

    >>> round(float(chi2_from_second_moment(0.01, 2.0)), 6)
    0.020814
    """
    most = np.log(given("largest", largest, 1.0, sys.float_info.max))
    slope = np.divide(np.expm1(most), most, out=np.ones_like(most), where=most > 0)
    with np.errstate(over="ignore"):  # the square of a slope alone might overflow beside 0
        return (slope * np.sqrt(given("second_moment", second_moment))) ** 2


@dataclass(frozen=True)
class Logged:
    """A metric that a framework prints, and what it says of the mean TV of a token.

    Args:
        framework: whose name it is.
        theorem: name in THEOREMS; it takes the metric as its first argument.
        direction: the TV is "at most" or "at least" what the theorem gives.
        assumes: names of ASSUMPTIONS beside the theorem's own.
        note: what else must be known of how the framework averages.
    """

    framework: str
    theorem: str
    direction: Literal["at most", "at least"] = "at most"
    assumes: tuple[str, ...] = ()
    note: str = ""


_PER_ANSWER = (
    "a mean of each answer's mean, and a bound only where answers are of one length, unless it "
    "runs with --calculate-per-token-loss"
)

_SIGNED = "k1: the mean of a sample may be negative, and then bounds nothing"

LOGGED: Mapping[str, Logged] = MappingProxyType(
    {
        "train_rollout_logprob_abs_diff": Logged(
            "slime", "tv_from_mean_abs_log_ratio", note=_PER_ANSWER
        ),
        "sampling/sampling_logp_difference/mean": Logged(
            "TRL", "tv_from_mean_abs_log_ratio", note="0.0 where every sampler logprob is NaN"
        ),
        "policy/rollout_train_logprobs_abs_diff_mean": Logged(
            "SkyRL", "tv_from_mean_abs_log_ratio"
        ),
        "token_mult_prob_error": Logged("NeMo-RL", "tv_from_mult_prob_error"),
        "training/rollout_probs_diff_mean": Logged("verl", "tv_at_least_probs_diff", "at least"),
        "rollout_corr/kl": Logged("verl", "tv_from_kl", assumes=_SAMPLED, note=_SIGNED),
        "rollout_corr/k3_kl": Logged("verl", "tv_from_kl", assumes=(*_SAMPLED, "support")),
        "mismatch_kl": Logged("prime-rl", "tv_from_kl", assumes=(*_SAMPLED, "support")),
        "optim/kl_sample_train_v1": Logged("tinker", "tv_from_kl", assumes=_SAMPLED, note=_SIGNED),
    }
)
