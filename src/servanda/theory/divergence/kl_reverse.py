# KL(train || infer): how surprised the infer kernel is by what the train kernel would draw.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.pairs import Floats, Pairs


def kl_reverse_terms(pairs: Pairs) -> Floats:
    """p log(p/q) - p + q of each token, nats, >= 0; inf where only train has the token."""
    return np.where(pairs.train_more, pairs.down, pairs.up)


@divergence("kl_reverse_nats", needs="logits", unit="nat", source="Kullback 1951")
def kl_reverse_exact(rows: LogitRows) -> Floats:
    """KL(train || infer) of each row, [R], nats; inf where infer misses a token of train."""
    return kl_reverse_terms(rows.pairs).sum(axis=-1)


@divergence(
    "kl_reverse_nats",
    needs="logprob",
    unit="nat",
    source="KL(train || infer) = E_infer (w log w - w + 1), where the supports agree",
)
def kl_reverse_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """w log w - (w - 1) of each sampled token, [N], nats, >= 0.

    Its mean under infer is KL(train || infer) only where infer can draw every token that
    train can; tokens it can never draw would make the divergence infinite and leave this
    mean finite.  A token without mass on train counts 1.

    >>> kl_reverse_sampled(np.log([0.5, 0.25]), np.log([0.5, 0.5])).round(3).tolist()
    [0.0, 0.153]
    """
    x_N = log_ratio(logp_train_N, logp_infer_N)
    finite_N = np.where(np.isneginf(x_N), 0.0, x_N)
    rise_N, below_N = np.expm1(finite_N), np.minimum(finite_N, 0.0)
    # far below 0 two large terms would cancel in the second form, near it in the first
    far_N = below_N * np.exp(below_N) - rise_N
    value_N = np.where(finite_N < -1, far_N, (finite_N - 1) * rise_N + finite_N)
    return np.where(np.isneginf(x_N), 1.0, value_N)
