# What the outcomes of a slice add to the total variation, and to a mass that moved.
#
# A slice S of outcomes holds the sampled tokens themselves, such as all rare ones.  On it
# only two things are defined: half the sum over S of |p - q|, and p(S) - q(S).  Both are
# means under infer over *all* tokens, of a value that is 0 outside S.

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
    """|w - 1| / 2 of each sampled token, [N], >= 0: what its outcome adds to the TV.

    On a slice S of outcomes, the sum over the tokens of S divided by the number of all
    tokens estimates half the sum over S of |p - q|.  (1 - w)^+ would read 0 where train
    gives S more mass, which is why S has this metric of its own.  No largest value: a
    clause clips it.  Mass of outcomes that infer can never draw is not seen.

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
    tokens estimates p(S) - q(S), less the mass train gives to tokens of S that infer can
    never draw.  Over all outcomes it is 0 where the supports agree.

    >>> mass_gap(np.log([0.75, 0.25]), np.log([0.5, 0.5])).round(6).tolist()
    [0.5, -0.5]
    """
    return np.expm1(log_ratio(logp_train_N, logp_infer_N))
