# Contributions of a slice of outcomes to the total variation, and to a shift of mass.
#
# A slice S of outcomes consists of sampled tokens, such as all rare ones.  On it only two
# quantities are defined: half the sum over S of |p - q|, and p(S) - q(S).  Both are means under
# infer over *all* tokens, of a value that is 0 outside S.

from __future__ import annotations

import math

import numpy as np

from servanda.theory.divergence.base import divergence, log_ratio
from servanda.theory.divergence.pairs import Floats


@divergence(
    "tv_contribution",
    needs="logprob",
    unit="",
    source="E_infer of 1_S |w - 1| / 2 = sum over S of |p - q| / 2",
    outcome=True,
)
def tv_contribution(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """|w - 1| / 2 of each sampled token, [N], >= 0: the contribution of its outcome to the TV.

    On a slice S of outcomes, the sum over the tokens of S divided by the number of all
    tokens estimates half the sum over S of |p - q|.  (1 - w)^+ would be 0 if train gives S more
    mass, hence this separate metric.  Unbounded: a clause clips it.  Mass of outcomes that infer
    can never sample is not detected.

    >>> tv_contribution(np.log([0.75, 0.25]), np.log([0.5, 0.5])).round(6).tolist()
    [0.25, 0.25]
    """
    return np.abs(np.expm1(log_ratio(logp_train_N, logp_infer_N))) / 2


@divergence(
    "mass_gap",
    needs="logprob",
    unit="",
    span=(-1.0, math.inf),
    source="E_infer of 1_S (w - 1) = p(S) - q(S)",
    outcome=True,
)
def mass_gap(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """w - 1 of each sampled token, [N], >= -1; signed.

    On a slice S of outcomes, the sum over the tokens of S divided by the number of all
    tokens estimates p(S) - q(S), minus train's mass of tokens of S that infer can never sample.
    Over all outcomes it is 0 if the supports agree.

    >>> mass_gap(np.log([0.75, 0.25]), np.log([0.5, 0.5])).round(6).tolist()
    [0.5, -0.5]
    """
    return np.expm1(log_ratio(logp_train_N, logp_infer_N))
