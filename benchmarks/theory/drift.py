# Challenges of what makes a drift of logits and what becomes of it: casts, temperature,
# penalties, greedy choice.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.theorems.drift import (
    greedy_flip_impossible,
    linf_with_repetition_penalty,
    osc_from_linf,
)
from servanda.theory.bounds.drift import osc_at_temperature, osc_from_rounding, rounding_eps
from servanda.theory.divergence.precision import CAPTURES, rounded

Floats = NDArray[np.float64]

_SIZE = 6
_ROW = 64  # logits of a row that is cast
_CAST = ("float32", "float16", "bfloat16")


def _osc(drift_NV: Floats) -> Floats:
    return drift_NV.max(axis=1) - drift_NV.min(axis=1)


@challenge("osc_from_linf")
def _linf(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    drift_NV = rng.normal(size=(n, _SIZE)) * 10.0 ** rng.uniform(-3.0, 1.0, (n, 1))
    corner_NV = np.sign(drift_NV) * np.abs(drift_NV).max(axis=1, keepdims=True)
    for what, case_NV in (("random drift", drift_NV), ("corners", corner_NV)):
        yield Trial(_osc(case_NV), osc_from_linf(np.abs(case_NV).max(axis=1)), what=what)


@challenge("osc_at_temperature")
def _temperature(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    logits_NV, drift_NV = 5.0 * rng.normal(size=(n, _SIZE)), rng.normal(size=(n, _SIZE))
    tau_N = 10.0 ** rng.uniform(-1.0, 1.0, n)
    scaled_NV = (logits_NV + drift_NV) / tau_N[:, None] - logits_NV / tau_N[:, None]
    yield Trial(_osc(scaled_NV), osc_at_temperature(_osc(drift_NV), tau_N))


@challenge("linf_with_repetition_penalty")
def _penalty(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Logits of both signs, some that the drift carries over 0, some tokens not repeated."""
    logits_NV, drift_NV = 2.0 * rng.normal(size=(n, _SIZE)), rng.normal(size=(n, _SIZE))
    theta_N1 = 10.0 ** rng.uniform(-0.5, 0.5, (n, 1))
    repeated_NV = rng.random((n, _SIZE)) < 0.7

    def penalised(row_NV: Floats) -> Floats:
        return np.where(
            repeated_NV, np.where(row_NV > 0, row_NV / theta_N1, row_NV * theta_N1), row_NV
        )

    moved_NV = penalised(logits_NV + drift_NV) - penalised(logits_NV)
    linf_N = np.abs(drift_NV).max(axis=1)
    said_N = linf_with_repetition_penalty(linf_N, theta_N1[:, 0])
    yield Trial(np.abs(moved_NV).max(axis=1), said_N)


@challenge("greedy_flip_impossible")
def _greedy(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Whether the best token changes, on a grid where sums and ties are exact."""
    logits_NV = rng.integers(-64, 64, (n, _SIZE)) / 16
    best_N = logits_NV.argmax(axis=1)
    ranked_NV = np.sort(logits_NV, axis=1)
    margin_N = ranked_NV[:, -1] - ranked_NV[:, -2]
    drift_NV = rng.integers(0, 32, (n, _SIZE)) / 16
    against_NV = np.repeat(margin_N[:, None] + rng.integers(-2, 3, (n, 1)) / 16, _SIZE, axis=1)
    against_NV[np.arange(n), best_N] = 0.0
    for what, case_NV in (("random drift", drift_NV), ("all but the best rise", against_NV)):
        flips_N = (logits_NV + case_NV).argmax(axis=1) != best_N
        may_N = ~greedy_flip_impossible(margin_N, _osc(case_NV))
        yield Trial(flips_N.astype(np.float64), may_N.astype(np.float64), what=what)


@challenge("rounding_eps")
def _rounding(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for capture in _CAST:
        logit_N = rng.normal(size=n) * 10.0 ** rng.uniform(-3.0, 3.0, n)
        logit_N = logit_N[np.abs(logit_N) > 2.0**-14]  # float16 has steps of its own below
        error_N: Floats = np.abs(rounded(logit_N, capture) - logit_N)
        yield Trial(error_N, rounding_eps(np.abs(logit_N), CAPTURES[capture]), what=capture)


@challenge("osc_from_rounding")
def _cast(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for capture in _CAST:
        logits_NV = 2.0 ** rng.integers(-2, 6, (n, 1)) * rng.uniform(1.0, 2.0, (n, _ROW))
        logits_NV *= rng.choice([-1.0, 1.0], (n, _ROW))
        error_NV = rounded(logits_NV, capture) - logits_NV
        said_N = osc_from_rounding(np.abs(logits_NV).max(axis=1), CAPTURES[capture])
        yield Trial(_osc(error_NV), said_N, what=capture)
