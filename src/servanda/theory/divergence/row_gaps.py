# Differences of two rows of logits: their drift, their entropies, their top-1 tokens.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import Floats, LogitRows, divergence

# Oscillation of the logit drift: the quantity of every sharp one-token bound.


@divergence(
    "logit_osc_nats",
    needs="logits",
    unit="nat",
    source="max - min of the logit difference; blind to a common shift",
    of_sums=lambda sums: sums.high - sums.low,
)
def logit_osc(rows: LogitRows) -> Floats:
    """max - min over the vocabulary of (train - infer) logits, [R], nats.

    Tokens without mass on both sides are excluded; a token that only one side can sample makes it
    inf.
    """
    highest_R = np.where(rows.neither_RV, -np.inf, rows.drift_RV).max(axis=-1)
    lowest_R = np.where(rows.neither_RV, np.inf, rows.drift_RV).min(axis=-1)
    return highest_R - lowest_R


# The largest logit drift, at the common shift of all logits that makes it smallest.


@divergence(
    "logit_linf_nats",
    needs="logits",
    unit="nat",
    source="min over c of max |drift - c| = osc / 2",
    of_sums=lambda sums: (sums.high - sums.low) / 2,
)
def logit_linf(rows: LogitRows) -> Floats:
    """Largest |train - infer| logit at the common shift that makes it smallest, [R], nats.

    Half of `logit_osc_nats`: a shift of all logits changes no probability, so the plain
    largest difference would be misleading.
    """
    return logit_osc(rows) / 2


# Entropy: whether one kernel is surer of its next token than the other.


@divergence(
    "entropy_nats",
    needs="logits",
    unit="nat",
    source="|H(train) - H(infer)|, Shannon 1948",
    of_sums=lambda sums: sums.entropy_gap,
)
def entropy_gap(rows: LogitRows) -> Floats:
    """|H(train) - H(infer)| of each row, [R], nats.

    Where p and q are close, computed as sum (p - q) log q + p log(p/q), which avoids the difference
    of two large numbers.  Finite also for different supports; 0 does not mean that the rows agree.
    """
    pairs = rows.pairs
    p_RV = pairs.larger + np.minimum(pairs.difference, 0.0)
    q_RV = pairs.larger - np.maximum(pairs.difference, 0.0)
    # 0 log 0 = 0
    logp_RV, logq_RV = (np.maximum(x, -1000.0) for x in (pairs.train_logp, pairs.infer_logp))
    near_RV = pairs.difference * logq_RV + p_RV * pairs.log_weight
    far_RV = p_RV * logp_RV - q_RV * logq_RV
    return np.abs(np.where(pairs.gap < -1.0, far_RV, near_RV).sum(axis=-1))


# Whether the two kernels disagree on the most likely token.


_SPAN = (0.0, 1.0)


@divergence(
    "top1_flip",
    needs="logits",
    unit="",
    span=_SPAN,
    source="definition",
    of_sums=lambda sums: sums.flip,
)
def top1_flip_exact(rows: LogitRows) -> Floats:
    """1 if the top-1 tokens of the two rows differ, else 0, [R]; ties go to the lower id."""
    return (rows.train_RV.argmax(axis=-1) != rows.infer_RV.argmax(axis=-1)).astype(np.float64)


@divergence("top1_flip", needs="top1", unit="", span=_SPAN, source="definition")
def top1_flip(top1_train_N: Floats, top1_infer_N: Floats) -> Floats:
    """1 if the recorded top-1 tokens differ, else 0, [N]; NaN if one is not recorded."""
    flips_N = np.asarray(top1_train_N) != np.asarray(top1_infer_N)
    unknown_N = np.isnan(top1_train_N) | np.isnan(top1_infer_N)
    return np.where(unknown_N, np.nan, flips_N.astype(np.float64))
