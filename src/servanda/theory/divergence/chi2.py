# chi^2(train || infer): the variance of the importance weight.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.pairs import Floats, Pairs

_SOURCE = "Pearson 1900; E_infer (w - 1)^2, where infer has every token of train"


def chi2_terms(pairs: Pairs) -> Floats:
    """(p - q)^2 / q of each token; inf if only train has the token."""
    # larger^2 / q, formed before exp: neither p^2 nor 1/q may leave the range of floats
    log_scale = pairs.infer_logp + 2 * np.maximum(pairs.log_weight, 0.0)
    terms = np.exp(log_scale) * pairs.fall**2
    return np.where(np.isposinf(pairs.log_weight), np.inf, terms)


@divergence("chi2", needs="logits", unit="", source=_SOURCE, of_sums=lambda sums: sums.chi2)
def chi2_exact(rows: LogitRows) -> Floats:
    """chi^2(train || infer) of each row, [R]; inf if infer lacks a token of train."""
    return chi2_terms(rows.pairs).sum(axis=-1)


@divergence("chi2", needs="logprob", unit="", source=_SOURCE)
def chi2_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(w - 1)^2 of each sampled token, [N], >= 0.

    Its mean under infer is chi^2(train || infer) only if infer can sample every token of train. The
    mean converges slowly: rare large weights dominate it.

    >>> chi2_sampled(np.log([0.75]), np.log([0.5])).round(6).tolist()
    [0.25]
    """
    return np.expm1(log_ratio(logp_train_N, logp_infer_N)) ** 2
