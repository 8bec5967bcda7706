# The metric `beyond_e`: how often the two kernels give a token probabilities a factor of e apart.

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio

_SOURCE = "an example of a metric of another package"


@divergence("beyond_e", needs="logprob", unit="", span=(0.0, 1.0), source=_SOURCE)
def beyond_e(logp_train_N, logp_infer_N):
    """1 for a sampled token with abs(log ratio) > 1, otherwise 0, [N]."""
    return (np.abs(log_ratio(logp_train_N, logp_infer_N)) > 1).astype(np.float64)


@divergence("beyond_e", needs="logits", unit="", span=(0.0, 1.0), source=_SOURCE)
def beyond_e_exact(rows: LogitRows):
    """The probability of such tokens under infer, [R]: the mean of the form above."""
    return (np.exp(rows.infer_logp_RV) * (np.abs(rows.log_weight_RV) > 1)).sum(axis=-1)
