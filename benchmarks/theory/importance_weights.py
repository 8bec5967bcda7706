# Challenges of the weight gap: enumerated vocabularies with and without missing support.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.random_kernels import distributions, near
from servanda.theory.bounds.importance_weights import PSI, Psi, weight_gap

BAND = (0.5, 2.0)


def psis() -> tuple[Psi, ...]:
    """Every weighting that a sample can certify, at a usual setting."""
    return (
        PSI["naive"](),
        PSI["tis"](2.0),
        PSI["mis"](BAND),
        PSI["icepop"](BAND),
        PSI["reject"](BAND),
        PSI["clip"](0.2),
        PSI["clip"](1.5),
    )


@challenge("weight_gap")
def _weight_gap(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """E_q g(w) is sum |p - q psi(w)|, whatever infer cannot draw."""
    p_NV = distributions(rng, n, 5)
    q_NV = near(rng, p_NV)
    q_NV = np.where(rng.random((n, 1)) < 0.5, q_NV, distributions(rng, n, 5))
    drawn_NV = q_NV > 0
    with np.errstate(divide="ignore"):
        log_ratio_NV = np.where(drawn_NV, np.log(p_NV) - np.log(np.where(drawn_NV, q_NV, 1.0)), 0.0)
    for psi in psis():
        weight_NV = np.where(drawn_NV, psi.weight(np.exp(log_ratio_NV)), 0.0)
        exact_N = np.abs(p_NV - q_NV * weight_NV).sum(axis=1)
        said_N = (q_NV * weight_gap(log_ratio_NV, psi)).sum(axis=1)
        yield Trial(exact_N, said_N, "equal", psi.name)
