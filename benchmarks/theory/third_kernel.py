# Challenges of what a third kernel adds: other routes, or older weights.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.theory.base import Floats, Trial, challenge
from benchmarks.theory.random_kernels import distributions, near
from benchmarks.theory.trees import Trees, grove
from benchmarks.theory.weighting_gap import exact_gap, pairs, ratios
from servanda.theory.bounds.importance_weights import PSI
from servanda.theory.bounds.third_kernel import tv_with_own_routes, weight_gap_with_lag

_PSIS = (
    PSI["naive"](),
    PSI["is"](),
    *(PSI["tis"](cap) for cap in (1.0, 2.0)),
    *(PSI["clip"](c) for c in (0.2, 1.5)),
)


def _tv(p_NV: Floats, q_NV: Floats) -> Floats:
    return 0.5 * np.abs(p_NV - q_NV).sum(axis=1)


@challenge("tv_with_own_routes")
def _routes(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Three kernels of a context and of whole responses; on a line the bound is attained."""
    replayed_NV, infer_NV = pairs(rng, n)
    own_NV = distributions(rng, n, replayed_NV.shape[1])
    share_N1 = rng.random((n, 1))
    between_NV = share_N1 * own_NV + (1.0 - share_N1) * infer_NV
    for way_NV, what in ((replayed_NV, "random kernels"), (between_NV, "on a line")):
        said_N = tv_with_own_routes(_tv(way_NV, infer_NV), _tv(own_NV, way_NV))
        yield Trial(_tv(own_NV, infer_NV), said_N, what=what)
    for one in grove(rng, n // 2):
        own = one.train_NLTV[rng.permutation(len(one.train_NL))]
        to_replayed, to_infer = (
            Trees(one.token_LT, one.live_LT, own, side) for side in (one.train_NLTV, one.infer_NLTV)
        )
        said_N = tv_with_own_routes(one.tv_N, to_replayed.tv_N)
        yield Trial(to_infer.tv_N, said_N, what="whole responses")


@challenge("weight_gap_with_lag")
def _lag(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Weights that moved on at random, and towards the tokens of the largest ratio."""
    old_NV, q_NV = pairs(rng, n)
    rows = np.arange(n)
    w_NV = np.where(q_NV > 0, ratios(old_NV, q_NV), np.inf)
    least_N = np.where(old_NV > 0, w_NV, np.inf).argmin(axis=1)
    moved_N = old_NV[rows, least_N] * rng.random(n)
    far_NV = old_NV.copy()
    far_NV[rows, least_N] -= moved_N
    far_NV[rows, w_NV.argmax(axis=1)] += moved_N
    for new_NV, what in (
        (near(rng, old_NV), "random updates"),
        (distributions(rng, n, old_NV.shape[1]), "unrelated weights"),
        (far_NV, "towards the largest ratio"),
    ):
        for psi in _PSIS:
            said_N = weight_gap_with_lag(exact_gap(old_NV, q_NV, psi), _tv(new_NV, old_NV), psi)
            yield Trial(exact_gap(new_NV, q_NV, psi), said_N, what=f"{psi.name}, {what}")
