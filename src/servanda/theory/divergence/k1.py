# k1: the plain estimate of KL(infer || train), which is negative for half of the tokens.

from __future__ import annotations

import math

from servanda.theory.divergence.base import divergence, log_ratio
from servanda.theory.divergence.pairs import Floats


@divergence(
    "k1_nats",
    needs="logprob",
    unit="nat",
    span=(-math.inf, math.inf),
    source="J. Schulman, Approximating KL Divergence, 2020, estimator k1",
)
def k1(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """-log w of each sampled token, [N], nats; signed, inf where train gives it no mass.

    Its mean under infer is KL(infer || train), and its spread is of first order where the
    KL is of second: at sd(log w) = 0.02 one token's k1 strays a hundred times the mean.
    `k3_nats` has the same mean where the supports agree and is never negative.  Unbounded
    both ways, so a clause takes a percentile of it.

    >>> k1([-1.5], [-1.0]).tolist()
    [0.5]
    """
    return 0.0 - log_ratio(logp_train_N, logp_infer_N)
