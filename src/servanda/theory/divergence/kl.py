# KL(infer || train) of whole rows: what k1 and k3 estimate.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence
from servanda.theory.divergence.pairs import Floats, Pairs

_SOURCE = "Kullback and Leibler 1951, in Bregman form"


def kl_terms(pairs: Pairs) -> Floats:
    """q log(q/p) - q + p of each token, nats, >= 0.

    inf where infer has a token that train has not; the sum over a vocabulary is
    KL(infer || train), for there the terms p - q add up to 0.  Unlike those of
    sum q log(q/p), the terms are all of second order: none cancels another.
    """
    return np.where(pairs.train_more, pairs.up, pairs.down)


@divergence("kl_nats", needs="logits", unit="nat", source=_SOURCE)
def kl_exact(rows: LogitRows) -> Floats:
    """KL(infer || train) of each row, [R], nats; inf where train misses a token of infer.

    Its sampled forms are `k3_nats`, which is never negative, and `k1_nats`.
    """
    return kl_terms(rows.pairs).sum(axis=-1)
