# Challenges of the bounds from exceedances: enumerated vocabularies, and their worst cases.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.random_kernels import distributions, near
from servanda.theory.bounds.drift import tv_from_exceedance


@challenge("tv_from_exceedance")
def _tv_from_exceedance(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Random pairs at random thresholds, and tokens that lose as much as they may."""
    p_NV = distributions(rng, n, 6)
    q_NV = near(rng, p_NV)
    q_NV = np.where(rng.random((n, 1)) < 0.5, q_NV, distributions(rng, n, 6))
    rho_N = 10.0 ** rng.uniform(-3.0, 0.5, n)
    with np.errstate(divide="ignore", invalid="ignore"):
        far_NV = ~(np.abs(np.log(p_NV) - np.log(q_NV)) <= rho_N[:, None])
    share_N = np.minimum((q_NV * (far_NV & (q_NV > 0))).sum(axis=1), 1.0)
    tv_N = 0.5 * np.abs(p_NV - q_NV).sum(axis=1)
    yield Trial(tv_N, tv_from_exceedance(rho_N, share_N), what="random pairs")
    # three outcomes: lost to train, shrunk by e^-rho, and what infer cannot draw
    share_N = rng.random(n)
    left_N = (1 - share_N) * np.exp(-rho_N)
    q_N3 = np.stack([share_N, 1 - share_N, np.zeros(n)], axis=1)
    p_N3 = np.stack([np.zeros(n), left_N, 1 - left_N], axis=1)
    tv_N = 0.5 * np.abs(p_N3 - q_N3).sum(axis=1)
    yield Trial(tv_N, tv_from_exceedance(rho_N, share_N), what="mass that infer cannot draw")
