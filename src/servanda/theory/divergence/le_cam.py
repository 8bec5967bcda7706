# Le Cam's distance: bounded, smooth, and unbiased from sampled tokens alone.

from __future__ import annotations

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.pairs import Floats, Pairs


def le_cam_terms(pairs: Pairs) -> Floats:
    """(p - q)^2 / (p + q) / 2 of each token."""
    return 0.5 * pairs.larger * pairs.fall**2 / (2 + pairs.fall)


@divergence(
    "le_cam",
    needs="logits",
    unit="",
    span=(0.0, 1.0),
    source="Le Cam 1986; Vincze 1981",
    of_sums=lambda sums: sums.le_cam,
)
def le_cam_exact(rows: LogitRows) -> Floats:
    """sum (p - q)^2 / (p + q) / 2 of each row, [R], in [0, 1].

    With D = 2 le_cam: hellinger2 lies in [D/4, D/2] and js_nats in [D/4, (log 2 / 2) D].
    1 for disjoint supports.
    """
    return np.minimum(le_cam_terms(rows.pairs).sum(axis=-1), 1.0)


@divergence(
    "le_cam",
    needs="logprob",
    unit="",
    span=(-1.0, 1.0),
    source="E_infer of f(w) - f'(inf)(w - 1) with f(w) = (w - 1)^2 / (w + 1) / 2",
)
def le_cam_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(1 - w) / (1 + w) of each sampled token, [N], in [-1, 1]; signed.

    Its mean under infer is Le Cam's distance without any support assumption: tokens that infer can
    never sample are counted, because the sampled ones then have a smaller mean weight.

    >>> le_cam_sampled(np.log([0.25]), np.log([0.5])).round(3).tolist()
    [0.333]
    """
    return -np.tanh(log_ratio(logp_train_N, logp_infer_N) / 2)
