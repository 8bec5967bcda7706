# Challenges of the gaps that follow from a bound on log-ratios, a variation or a chi2.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.theory.base import Floats, Trial, challenge
from benchmarks.theory.importance_weights import psis
from benchmarks.theory.random_kernels import distributions, near
from benchmarks.theory.theorems.weighting_gap import tis_gap_from_chi2
from servanda.theory.bounds.importance_weights import (
    PSI,
    Psi,
    missing_mass,
    weight_gap_from_log_ratio,
    weight_gap_from_tv,
)

_SIZE = 5


def ratios(p_NV: Floats, q_NV: Floats) -> Floats:
    """w = p / q where infer can draw a token, else 0, which weighs nothing."""
    return np.divide(p_NV, q_NV, out=np.zeros_like(p_NV), where=q_NV > 0)


def exact_gap(p_NV: Floats, q_NV: Floats, psi: Psi) -> Floats:
    """sum |p - q psi(w)|, [N]."""
    return np.abs(p_NV - q_NV * psi.weight(ratios(p_NV, q_NV))).sum(axis=1)


def pairs(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    """Two kernels each, from nearly equal to unrelated, with and without missing support."""
    p_NV = distributions(rng, n, _SIZE)
    return p_NV, np.where(rng.random((n, 1)) < 0.5, near(rng, p_NV), distributions(rng, n, _SIZE))


def _two_level(x_N: Floats, y_N: Floats) -> tuple[Floats, Floats]:
    """Kernels of two tokens whose ratios are x <= 1 and y >= 1."""
    width_N = y_N - x_N
    share_N = np.divide(1.0 - x_N, width_N, out=np.zeros_like(width_N), where=width_N > 0)
    q_NV = np.stack([1.0 - share_N, share_N], axis=1)
    return q_NV * np.stack([x_N, y_N], axis=1), q_NV


@challenge("weight_gap_from_log_ratio")
def _weight_gap_from_log_ratio(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV = distributions(rng, n, _SIZE, zeros=False)
    q_NV = near(rng, p_NV) * 0.999 + p_NV * 0.001
    rho_N = np.abs(np.log(p_NV) - np.log(q_NV)).max(axis=1)
    for psi in (*psis(), PSI["is"](), PSI["mis"]((0.0, 1.0))):
        said_N = weight_gap_from_log_ratio(rho_N, psi)
        yield Trial(exact_gap(p_NV, q_NV, psi), said_N, what=f"{psi.name}, random kernels")
        # two tokens, at an end or beside a bend of psi: nothing else can attain the bound
        rho_M = rng.uniform(0.0, 2.0, n // 4)
        ends_M = np.exp(-rho_M), np.exp(rho_M)
        at = [*ends_M] + [side + 0.0 * rho_M for b in psi.bends for side in _beside(b)]
        lows, highs = ([np.clip(x, *ends) for x in at] for ends in ((ends_M[0], 1), (1, ends_M[1])))
        for x_M in lows:
            for y_M in highs:
                exact_M = exact_gap(*_two_level(x_M, y_M), psi)
                said_M = weight_gap_from_log_ratio(rho_M, psi)
                yield Trial(exact_M, said_M, what=f"{psi.name}, two-level drift")


def _beside(bend: float) -> tuple[float, float, float]:
    return bend - 1e-13, bend, bend + 1e-13


@challenge("weight_gap_from_tv")
def _weight_gap_from_tv(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV, q_NV = pairs(rng, n)
    tv_N = np.maximum(q_NV - p_NV, 0.0).sum(axis=1)
    yield Trial(exact_gap(p_NV, q_NV, PSI["naive"]()), weight_gap_from_tv(tv_N), "equal")


@challenge("tis_gap_from_chi2")
def _tis_gap_from_chi2(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    random = pairs(rng, n)
    # w = cap - d or cap + d, with mean 1: |w - cap| is constant, as Cauchy-Schwarz wants it
    cap_N = 1.0 + rng.exponential(0.5, n)
    far_N = (cap_N - 1.0) + rng.random(n) * (1.0 - (cap_N - 1.0)).clip(0.0)
    two_level = _two_level(np.maximum(cap_N - far_N, 0.0), cap_N + far_N)
    for (p_NV, q_NV), what in ((random, "random kernels"), (two_level, "two-level ratios")):
        w_NV = ratios(p_NV, q_NV)
        missing_N = ((q_NV == 0) & (p_NV > 0)).any(axis=1)
        chi2_N = np.where(missing_N, np.inf, (q_NV * (w_NV - 1.0) ** 2).sum(axis=1))
        exact_N = np.abs(p_NV - q_NV * np.minimum(w_NV, cap_N[:, None])).sum(axis=1)
        yield Trial(exact_N, tis_gap_from_chi2(chi2_N, cap_N), what=what)


@challenge("missing_mass")
def _missing_mass(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV, q_NV = pairs(rng, n)
    cut_NV = rng.random(p_NV.shape) < 0.3
    cut_NV[:, 0] = False
    kept_NV = np.where(cut_NV, 0.0, p_NV + 1e-12)
    filtered_NV = kept_NV / kept_NV.sum(axis=1, keepdims=True)
    for infer_NV, what in ((q_NV, "random kernels"), (filtered_NV, "the same, filtered")):
        missing_N = np.where(infer_NV > 0, 0.0, p_NV).sum(axis=1)
        for cap in (0.5, 1.0, 2.0, 1e3):
            capped_N = (infer_NV * np.minimum(ratios(p_NV, infer_NV), cap)).sum(axis=1)
            yield Trial(missing_N, missing_mass(capped_N, cap), what=f"{what}, cap {cap:g}")
