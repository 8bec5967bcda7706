# |log p_train/p_infer| of the sampled token, and its largest value over a row.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import Floats, LogitRows, divergence, log_ratio


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
