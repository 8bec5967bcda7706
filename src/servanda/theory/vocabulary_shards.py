# The record of a kernel (`sampling.columns_of`) from shards of the vocabulary: what each shard sees
# of its own logits, and how the shards add up.
#
# Two steps: the logprob of a token, its rank and the entropy need the normaliser and the token's
# logit first, which one shard alone does not have.
# Axes: N shards, R rows (positions), W tokens of a shard, C columns, K best.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servanda.theory.sampling import BEST, Floats, Ints, best_columns, likeliest


@dataclass(frozen=True)
class Summary:
    """The first step, of all shards: what each of them needs for the second.

    Args:
        log_z_R: log normaliser, nats; not finite in a row with NaN, with +inf or without mass.
        own_R: logit of the given token.
        id_RK, logit_RK: the most likely tokens, best first, ties by id.
    """

    log_z_R: Floats
    own_R: Floats
    id_RK: Floats
    logit_RK: Floats


def summary_of(logit_RW: Floats, token_R: Ints, start: int) -> Floats:
    """The first step on one shard.

    Args:
        logit_RW: logits of the tokens from `start` on, divided by the temperature, nats; W may be
            0 and other than that of the other shards.
        token_R: the given token of each row, of any shard.

    Returns:
        [R, C], for `summed_up`; C is the same for all shards.
    """
    rows, size = logit_RW.shape
    with np.errstate(invalid="ignore"):
        top_R = logit_RW.max(axis=1, initial=-np.inf)
        anchor_R1 = np.where(np.isneginf(top_R), 0.0, top_R)[:, None]
        total_R = np.exp(logit_RW - anchor_R1).sum(axis=1)
    inside_R = (token_R >= start) & (token_R < start + size)
    own_R = np.full(rows, -np.inf)
    own_R[inside_R] = logit_RW[inside_R, token_R[inside_R] - start]
    best_RC = np.full((rows, 2 * BEST), np.inf)  # of a shard with fewer tokens: ids that rank last
    best_RC[:, BEST:] = -np.inf
    if size:
        best = likeliest(logit_RW, BEST)
        for k in range(min(BEST, size)):
            best_RC[:, k] = best[f"id.{k}"] + start
            best_RC[:, BEST + k] = best[f"logp.{k}"]
    return np.column_stack([top_R, total_R, own_R, best_RC])


def summed_up(summary_NRC: Floats) -> Summary:
    """The first step, from all shards in the order of their tokens."""
    top_NR, total_NR, own_NR = summary_NRC[..., 0], summary_NRC[..., 1], summary_NRC[..., 2]
    id_RK, logit_RK = (
        np.concatenate(list(summary_NRC[..., at : at + BEST]), axis=1) for at in (3, 3 + BEST)
    )
    order_RK = np.lexsort((id_RK, -logit_RK), axis=1)[:, :BEST]
    id_RK, logit_RK = (np.take_along_axis(x, order_RK, axis=1) for x in (id_RK, logit_RK))
    known = int(np.isfinite(id_RK).all(axis=0).sum())  # fewer in a small vocabulary
    top_R = top_NR.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        log_z_R = top_R + np.log((total_NR * np.exp(top_NR - top_R)).sum(axis=0))
    return Summary(log_z_R, own_NR.max(axis=0), id_RK[:, :known], logit_RK[:, :known])


def sums_of(logit_RW: Floats, token_R: Ints, start: int, whole: Summary) -> Floats:
    """The second step on one shard: [R, 3]; shards add up by `+`."""
    logp_RW = logit_RW - whole.log_z_R[:, None]
    p_RW = np.exp(logp_RW)
    own_R1, id_W = whole.own_R[:, None], start + np.arange(logit_RW.shape[1])
    before_RW = (logit_RW > own_R1) | ((logit_RW == own_R1) & (id_W < token_R[:, None]))
    # a token without mass adds 0; the product would be 0 * -inf
    entropy_R = -(p_RW * np.maximum(logp_RW, -1e300)).sum(axis=1)
    mass_R = (p_RW * before_RW).sum(axis=1)
    return np.column_stack([before_RW.sum(axis=1).astype(np.float64), mass_R, entropy_R])


def columns_of_shards(whole: Summary, sums_RC: Floats) -> dict[str, Floats]:
    """`sampling.columns_of` the whole vocabulary, to rounding; of rows with a finite log_z."""
    rank_R, mass_before_R, entropy_R = sums_RC.T
    logp_RK = whole.logit_RK - whole.log_z_R[:, None]
    return {
        "logp": whole.own_R - whole.log_z_R,
        "top1": whole.id_RK[:, 0],
        "rank": rank_R,
        "entropy_nats": entropy_R,
        "p_max": np.exp(logp_RK[:, 0]),
        "mass_before": mass_before_R,
        **best_columns(whole.id_RK, logp_RK),
    }
