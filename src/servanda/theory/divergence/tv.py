# Total variation: half the L1 distance of two next-token distributions.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.pairs import Floats, Pairs

_SPAN = (0.0, 1.0)


def tv_terms(pairs: Pairs) -> Floats:
    """|p - q| / 2 of each token, without loss of digits if p and q are nearly equal."""
    return -0.5 * pairs.larger * pairs.fall


@divergence(
    "tv", needs="logits", unit="", span=_SPAN, source="definition", of_sums=lambda sums: sums.tv
)
def tv_exact(rows: LogitRows) -> Floats:
    """TV(train, infer) of each row, [R], in [0, 1]."""
    return np.minimum(tv_terms(rows.pairs).sum(axis=-1), 1.0)


@divergence("tv", needs="logprob", unit="", span=_SPAN, source="TV = E_infer (1 - w)^+")
def tv_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(1 - w)^+ of each sampled token, [N], in [0, 1]; its mean under infer is the TV.

    Unbiased without any support assumption: mass that infer can never sample is counted, because
    the sampled tokens then have a mean weight below 1.

    >>> tv_sampled(np.log([0.25]), np.log([0.5])).tolist()
    [0.5]
    """
    return -np.expm1(np.minimum(log_ratio(logp_train_N, logp_infer_N), 0.0))


# |log p_train/p_infer| of the sampled token, and its largest value over a row.


@divergence("abs_log_ratio_nats", needs="logprob", unit="nat", source="definition")
def abs_log_ratio(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """|log w| of each sampled token, [N], nats; inf without mass under train.

    Known elsewhere as train_rollout_logprob_abs_diff (slime) and
    sampling_logp_difference (TRL).

    >>> abs_log_ratio(np.log([0.25]), np.log([0.5])).round(3).tolist()
    [0.693]
    """
    return np.abs(log_ratio(logp_train_N, logp_infer_N))


@divergence(
    "abs_log_ratio_nats",
    needs="logits",
    unit="nat",
    source="definition",
    of_sums=lambda sums: np.maximum(sums.high - sums.shift, sums.shift - sums.low),
)
def abs_log_ratio_exact(rows: LogitRows) -> Floats:
    """max over the vocabulary of |log p/q|, [R], nats."""
    return -rows.pairs.gap.min(axis=-1)
