# Challenges of partial observations: enumerated rows of which only a part is shown.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.random_kernels import Floats, distributions, near
from benchmarks.theory.theorems.partial_observation import (
    chi2_from_second_moment,
    tv_at_least_probs_diff,
    tv_from_mean_abs_log_ratio,
    tv_from_mult_prob_error,
    tv_interval_full,
    tv_rao_blackwell,
)
from servanda.theory.divergence.topk_rows import TopK

SIZES = (2, 3, 6)
_LEAST = 1e-6  # mass of every token, where full support is asked for


def _rows(
    rng: np.random.Generator, n: int, *, support: bool = False
) -> Iterator[tuple[Floats, Floats]]:
    """(p, q) of rows [N, V] of several sizes, near and far; then p beyond what q can draw."""
    for size in SIZES:
        p_NV = distributions(rng, n // len(SIZES) + 1, size)
        q_NV = near(rng, p_NV)
        if support:
            p_NV, q_NV = ((1 - size * _LEAST) * x_NV + _LEAST for x_NV in (p_NV, q_NV))
        yield p_NV, q_NV
        if not support:
            q_NV = np.concatenate([q_NV, np.zeros((len(q_NV), 1))], axis=1)
            beyond_N1 = rng.random((len(q_NV), 1)) ** 3
            yield (1 - beyond_N1) * q_NV + beyond_N1 * np.eye(size + 1)[size], q_NV


def _log_ratio(p_NV: Floats, q_NV: Floats) -> Floats:
    """Log p - log q; 0 at tokens that infer never draws."""
    drawn_NV = q_NV > 0
    with np.errstate(divide="ignore"):
        return np.where(drawn_NV, np.log(p_NV) - np.log(np.where(drawn_NV, q_NV, 1.0)), 0.0)


def _tv(p_NV: Floats, q_NV: Floats) -> Floats:
    return np.abs(p_NV - q_NV).sum(axis=1) / 2.0


def _mean(q_NV: Floats, value_NV: Floats) -> Floats:
    """E_infer of a value of each token, which may be inf where it is never drawn."""
    return (q_NV * np.where(q_NV > 0, value_NV, 0.0)).sum(axis=1)


@challenge("tv_rao_blackwell")
def _rao_blackwell(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Every token of a row drawn in turn: the mean is TV, the second moment never more."""
    for p_NV, q_NV in _rows(rng, n):
        log_ratio_NV = _log_ratio(p_NV, q_NV)
        rows, size = p_NV.shape
        k = int(rng.integers(1, size + 1))
        ids_NK = np.argsort(-q_NV, axis=1)[:, :k]
        among_NV = np.zeros((rows, size), dtype=bool)
        np.put_along_axis(among_NV, ids_NK, True, axis=1)
        with np.errstate(divide="ignore"):
            train, infer = (
                np.log(np.take_along_axis(x_NV, ids_NK, axis=1)).repeat(size, axis=0)
                for x_NV in (p_NV, q_NV)
            )
        x_NV = tv_rao_blackwell(train, infer, log_ratio_NV.ravel(), among_NV.ravel())
        x_NV = x_NV.reshape(rows, size)
        alone_NV = np.maximum(-np.expm1(log_ratio_NV), 0.0)
        yield Trial(_tv(p_NV, q_NV), _mean(q_NV, x_NV), "equal", "mean")
        yield Trial(_mean(q_NV, x_NV**2), _mean(q_NV, alone_NV**2), what="second moment", side=True)
        yield Trial(x_NV.max(axis=1), np.ones(rows), what="largest value", side=True)


@challenge("tv_interval_full")
def _interval_full(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for p_NV, q_NV in _rows(rng, n):
        for k in range(1, q_NV.shape[1] + 1):
            ids_NK = np.argsort(-q_NV, axis=1)[:, :k]
            with np.errstate(divide="ignore"):
                infer = TopK(ids_NK, np.log(np.take_along_axis(q_NV, ids_NK, axis=1)))
                ends_N2 = tv_interval_full(np.log(p_NV), infer)
            yield Trial(_tv(p_NV, q_NV), ends_N2[:, 1], what=f"upper end, {k} returned")
            yield Trial(_tv(p_NV, q_NV), ends_N2[:, 0], "at least", f"lower end, {k} returned")


@challenge("tv_from_mean_abs_log_ratio")
def _abs_log_ratio(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for p_NV, q_NV in _rows(rng, n):
        log_ratio_NV = _log_ratio(p_NV, q_NV)
        mean_N = _mean(q_NV, np.abs(log_ratio_NV))
        # of log w alone, as it is sampled; rounding must not make it negative
        kl_N = np.maximum(_mean(q_NV, -log_ratio_NV), 0.0)
        yield Trial(_tv(p_NV, q_NV), tv_from_mean_abs_log_ratio(mean_N), what="mean")
        yield Trial(_tv(p_NV, q_NV), tv_from_mean_abs_log_ratio(mean_N, kl_N), what="with KL")


@challenge("tv_from_mult_prob_error")
def _mult_prob_error(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for p_NV, q_NV in _rows(rng, n, support=True):
        error_N = 1.0 + _mean(q_NV, np.expm1(np.abs(_log_ratio(p_NV, q_NV))))
        yield Trial(_tv(p_NV, q_NV), tv_from_mult_prob_error(error_N), what="rows")


@challenge("tv_at_least_probs_diff")
def _probs_diff(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for p_NV, q_NV in _rows(rng, n):
        least_N = tv_at_least_probs_diff(_mean(q_NV, np.abs(p_NV - q_NV)))
        yield Trial(_tv(p_NV, q_NV), least_N, "at least", "rows")


@challenge("chi2_from_second_moment")
def _second_moment(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Rows of any kind, and a rare token of weight R that the others pay for."""
    for p_NV, q_NV in _rows(rng, n, support=True):
        yield _chi2(p_NV, q_NV, "rows")
    rare_N = 10.0 ** rng.uniform(-6.0, -2.0, n)
    heavy_N = rng.uniform(1.0, 20.0, n)
    p_N, q_N = heavy_N * rare_N, rare_N
    yield _chi2(np.stack([p_N, 1 - p_N], 1), np.stack([q_N, 1 - q_N], 1), "a rare heavy token")


def _chi2(p_NV: Floats, q_NV: Floats, what: str) -> Trial:
    log_ratio_NV = _log_ratio(p_NV, q_NV)
    largest_N = np.exp(log_ratio_NV.max(axis=1).clip(min=0.0))
    said_N = chi2_from_second_moment(_mean(q_NV, log_ratio_NV**2), largest_N)
    return Trial(_mean(q_NV, np.expm1(log_ratio_NV) ** 2), said_N, what=what)
