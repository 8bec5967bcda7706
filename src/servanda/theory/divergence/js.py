# Jensen-Shannon divergence: how much one token tells about which kernel drew it.

from __future__ import annotations

import math

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence
from servanda.theory.divergence.pairs import Floats, Pairs


def js_terms(pairs: Pairs) -> Floats:
    """(p log(p/m) + q log(q/m)) / 2 of each token with m = (p + q) / 2, nats.

    Each logarithm is taken in Bregman form around 1, so that only terms of second order
    are subtracted.
    """
    half = pairs.fall / 2  # m / max(p, q) - 1
    middle = (1 + half) * np.log1p(half) - half
    return 0.5 * pairs.up - pairs.larger * middle


@divergence("js_nats", needs="logits", unit="nat", span=(0.0, math.log(2)), source="Lin 1991")
def js_exact(rows: LogitRows) -> Floats:
    """Jensen-Shannon divergence of each row, [R], nats, in [0, log 2].

    log 2 where the supports are disjoint.
    """
    return np.clip(js_terms(rows.pairs).sum(axis=-1), 0.0, math.log(2))
