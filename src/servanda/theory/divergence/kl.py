# KL divergences of whole rows, in both directions and to the midpoint, and estimators from sampled
# tokens: k1, k2 and k3 of KL(infer || train).

from __future__ import annotations

import math

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.pairs import Floats, Pairs

_SCHULMAN = "J. Schulman, Approximating KL Divergence, 2020, estimator"


def js_terms(pairs: Pairs) -> Floats:
    """(p log(p/m) + q log(q/m)) / 2 of each token with m = (p + q) / 2, nats.

    Each logarithm is taken in Bregman form around 1, so that only terms of second order
    are subtracted.
    """
    half = pairs.fall / 2  # m / max(p, q) - 1
    middle = (1 + half) * np.log1p(half) - half
    return 0.5 * pairs.up - pairs.larger * middle


@divergence(
    "js_nats",
    needs="logits",
    unit="nat",
    span=(0.0, math.log(2)),
    source="Lin 1991",
    of_sums=lambda sums: sums.js,
)
def js_exact(rows: LogitRows) -> Floats:
    """Jensen-Shannon divergence of each row, [R], nats, in [0, log 2].

    log 2 for disjoint supports.
    """
    return np.clip(js_terms(rows.pairs).sum(axis=-1), 0.0, math.log(2))


@divergence(
    "k1_nats",
    needs="logprob",
    unit="nat",
    span=(-math.inf, math.inf),
    source=f"{_SCHULMAN} k1",
)
def k1(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """-log w of each sampled token, [N], nats; signed, inf without mass under train.

    Its mean under infer is KL(infer || train); its standard deviation is of first order, but the KL
    of second: at sd(log w) = 0.02 one token's k1 deviates by a hundred times the mean. `k3_nats`
    has the same mean if the supports agree and is never negative.  Unbounded in both directions, so
    a clause uses a percentile of it.

    >>> k1([-1.5], [-1.0]).tolist()
    [0.5]
    """
    return 0.0 - log_ratio(logp_train_N, logp_infer_N)


@divergence(
    "k2_nats",
    needs="logprob",
    unit="nat",
    source=f"{_SCHULMAN} k2",
)
def k2(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(log w)^2 / 2 of each sampled token, [N], nats, >= 0; inf without mass under train.

    Biased: if the supports agree, its mean under infer is
    KL(infer || train) - E_infer [(log w)^3 / 6 + (log w)^4 / 24 + ...], which is near the
    KL only if weights are near 1.

    >>> k2([-1.5], [-1.0]).tolist()
    [0.125]
    """
    return log_ratio(logp_train_N, logp_infer_N) ** 2 / 2


def kl_terms(pairs: Pairs) -> Floats:
    """q log(q/p) - q + p of each token, nats, >= 0.

    inf if infer has a token that train lacks; the sum over a vocabulary is KL(infer || train),
    because the terms p - q add up to 0.  Unlike those of sum q log(q/p), the terms are all of
    second order, without cancellation.
    """
    return np.where(pairs.train_more, pairs.up, pairs.down)


@divergence(
    "kl_nats",
    needs="logits",
    unit="nat",
    source="Kullback and Leibler 1951, in Bregman form",
    of_sums=lambda sums: sums.kl + sums.only_train,
)
def kl_exact(rows: LogitRows) -> Floats:
    """KL(infer || train) of each row, [R], nats; inf if train lacks a token of infer.

    Its sampled forms are `k3_nats`, which is never negative, and `k1_nats`.
    """
    return kl_terms(rows.pairs).sum(axis=-1)


@divergence("k3_nats", needs="logprob", unit="nat", source=f"{_SCHULMAN} k3")
def k3(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """Per-token estimate of KL(infer || train); its mean is unbiased and never negative.

    Computed in float64 by expm1: in float32 the textbook exp(x) - x - 1 has no correct digit at |x|
    = 1e-4, a typical value of two similar kernels.

    Args:
        logp_train_N: train kernel, [N], nats.
        logp_infer_N: infer kernel, same tokens, [N], nats.

    Returns:
        [N], nats, >= 0; inf for a token without mass under the train kernel.

    Raises:
        EvidenceError: shapes differ, or a token has no usable logprob.

    >>> k3(np.log([0.5, 0.25]), np.log([0.5, 0.5])).round(3).tolist()
    [0.0, 0.193]
    """
    log_ratio_N = log_ratio(logp_train_N, logp_infer_N)
    return np.expm1(log_ratio_N) - log_ratio_N


@divergence(
    "k3_nats",
    needs="logits",
    unit="nat",
    source=f"{_SCHULMAN} k3",
    of_sums=lambda sums: sums.kl,
)
def k3_exact(rows: LogitRows) -> Floats:
    """Mean of k3 under infer at each row, [R], nats: the Bregman form of KL(infer || train).

    If infer lacks tokens of train, the mean of k3 is KL(infer || train) minus their mass; with
    equal supports it is the KL itself.
    """
    only_train_RV = np.isposinf(rows.log_weight_RV)
    return np.where(only_train_RV, 0.0, kl_terms(rows.pairs)).sum(axis=-1)


def kl_reverse_terms(pairs: Pairs) -> Floats:
    """p log(p/q) - p + q of each token, nats, >= 0; inf if only train has the token."""
    return np.where(pairs.train_more, pairs.down, pairs.up)


@divergence(
    "kl_reverse_nats",
    needs="logits",
    unit="nat",
    source="Kullback 1951",
    of_sums=lambda sums: sums.kl_reverse,
)
def kl_reverse_exact(rows: LogitRows) -> Floats:
    """KL(train || infer) of each row, [R], nats; inf if infer lacks a token of train."""
    return kl_reverse_terms(rows.pairs).sum(axis=-1)


@divergence(
    "kl_reverse_nats",
    needs="logprob",
    unit="nat",
    source="KL(train || infer) = E_infer (w log w - w + 1), where the supports agree",
)
def kl_reverse_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """w log w - (w - 1) of each sampled token, [N], nats, >= 0.

    Its mean under infer is KL(train || infer) only if infer can sample every token of train; tokens
    it can never sample make the divergence infinite, but not this mean.  A token without mass on
    train counts 1.

    >>> kl_reverse_sampled(np.log([0.5, 0.25]), np.log([0.5, 0.5])).round(3).tolist()
    [0.0, 0.153]
    """
    x_N = log_ratio(logp_train_N, logp_infer_N)
    finite_N = np.where(np.isneginf(x_N), 0.0, x_N)
    rise_N, below_N = np.expm1(finite_N), np.minimum(finite_N, 0.0)
    # the second form has cancellation far below 0, the first near 0
    far_N = below_N * np.exp(below_N) - rise_N
    value_N = np.where(finite_N < -1, far_N, (finite_N - 1) * rise_N + finite_N)
    return np.where(np.isneginf(x_N), 1.0, value_N)
