# Total variation: half the L1 distance of two next-token distributions.

from __future__ import annotations

import numpy as np

from servanda.divergence.base import Floats, LogitRows, divergence, log_ratio

_SPAN = (0.0, 1.0)


@divergence("tv", needs="logits", unit="", span=_SPAN, source="definition")
def tv_exact(rows: LogitRows) -> Floats:
    """TV(train, infer) of each row, [R], in [0, 1].

    Worked as sum q |expm1(log p/q)| / 2 over the tokens infer can draw, plus half the
    mass that only train has, so that nearly equal rows keep their digits.
    """
    q_RV = np.exp(rows.infer_logp_RV)
    log_weight_RV = rows.log_weight_RV
    drawn_RV = q_RV > 0
    difference_RV = np.where(drawn_RV, q_RV * np.expm1(np.where(drawn_RV, log_weight_RV, 0)), 0)
    only_train_R = np.where(drawn_RV, 0, np.exp(rows.train_logp_RV)).sum(axis=-1)
    return np.minimum((np.abs(difference_RV).sum(axis=-1) + only_train_R) / 2, 1.0)


@divergence("tv", needs="logprob", unit="", span=_SPAN, source="TV = E_infer (1 - w)^+")
def tv_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(1 - w)^+ of each sampled token, [N], in [0, 1]; its mean under infer is the TV.

    Unbiased without any support assumption: mass that infer can never draw is counted,
    because the drawn tokens then weigh less than 1 on average.

    >>> tv_sampled(np.log([0.25]), np.log([0.5])).tolist()
    [0.5]
    """
    return -np.expm1(np.minimum(log_ratio(logp_train_N, logp_infer_N), 0.0))
