# k2: half the squared log ratio, a biased estimate of the KL that is never negative.

from __future__ import annotations

from servanda.theory.divergence.base import divergence, log_ratio
from servanda.theory.divergence.pairs import Floats


@divergence(
    "k2_nats",
    needs="logprob",
    unit="nat",
    source="J. Schulman, Approximating KL Divergence, 2020, estimator k2",
)
def k2(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(log w)^2 / 2 of each sampled token, [N], nats, >= 0; inf where train gives it no mass.

    Biased: where the supports agree its mean under infer is
    KL(infer || train) - E_infer [(log w)^3 / 6 + (log w)^4 / 24 + ...], which is near the
    KL only while weights are near 1.

    >>> k2([-1.5], [-1.0]).tolist()
    [0.125]
    """
    return log_ratio(logp_train_N, logp_infer_N) ** 2 / 2
