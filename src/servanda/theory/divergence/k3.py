# k3: the estimate of KL(infer || train) that is never negative, and the KL it estimates.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.kl import kl_terms
from servanda.theory.divergence.pairs import Floats

_SOURCE = "J. Schulman, Approximating KL Divergence, 2020, estimator k3"


@divergence("k3_nats", needs="logprob", unit="nat", source=_SOURCE)
def k3(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """Per-token estimate of KL(infer || train); its mean is unbiased and never negative.

    Worked in float64 through expm1: in float32 the textbook exp(x) - x - 1 has no
    correct digit left at |x| = 1e-4, which is where two good kernels live.

    Args:
        logp_train_N: train kernel, [N], nats.
        logp_infer_N: infer kernel, same tokens, [N], nats.

    Returns:
        [N], nats, >= 0; inf where the train kernel gives a token no mass.

    Raises:
        EvidenceError: shapes differ, or a token has no usable logprob.

    >>> k3(np.log([0.5, 0.25]), np.log([0.5, 0.5])).round(3).tolist()
    [0.0, 0.193]
    """
    log_ratio_N = log_ratio(logp_train_N, logp_infer_N)
    return np.expm1(log_ratio_N) - log_ratio_N


@divergence("k3_nats", needs="logits", unit="nat", source=_SOURCE)
def k3_exact(rows: LogitRows) -> Floats:
    """Mean of k3 under infer at each row, [R], nats: the Bregman form of KL(infer || train).

    Where infer misses tokens that train has, the mean of k3 is KL(infer || train) less
    that mass; with equal supports it is the KL itself.
    """
    only_train_RV = np.isposinf(rows.log_weight_RV)
    return np.where(only_train_RV, 0.0, kl_terms(rows.pairs)).sum(axis=-1)
