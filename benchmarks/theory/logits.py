# Challenges of the logit bounds: drifts at random, of two levels, and climbed to the bound.
#
# A drift of two levels on a set of the right mass attains each bound.  Exact values are
# worked from the drift and not from the two rows, so that they keep their digits where the
# kernels are nearly equal.  Axes: N cases, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.random_kernels import distributions
from benchmarks.theory.theorems.logits import (
    chi2_from_osc,
    hellinger2_from_osc,
    log_ratio_bounds,
    tv_from_log_ratio,
    tv_from_osc_pmax,
)
from servanda.theory.bounds.drift import abs_log_ratio_from_osc, kl_from_osc, tv_from_osc

Floats = NDArray[np.float64]

_SIZE = 6
_STEPS = 40  # of a climb


@dataclass(frozen=True)
class Drifted:
    """Rows p and the drift that makes q of them, [N, V]; what they are."""

    p_NV: Floats
    drift_NV: Floats
    what: str

    @property
    def osc_N(self) -> Floats:
        """Of the tokens that have mass."""
        here_NV = self.p_NV > 0
        highest_N = np.where(here_NV, self.drift_NV, -np.inf).max(axis=1)
        return highest_N - np.where(here_NV, self.drift_NV, np.inf).min(axis=1)

    @property
    def log_ratio_NV(self) -> Floats:
        """log q - log p, also where p is 0."""
        # measured from the heaviest token, whose own log-ratio then keeps its digits
        heaviest_N1 = self.p_NV.argmax(axis=1)[:, None]
        over_NV = self.drift_NV - np.take_along_axis(self.drift_NV, heaviest_N1, axis=1)
        return over_NV - np.log1p((self.p_NV * np.expm1(over_NV)).sum(axis=1, keepdims=True))

    @property
    def q_NV(self) -> Floats:
        return self.p_NV * np.exp(self.log_ratio_NV)

    @property
    def swapped(self) -> Drifted:
        """The same pair with q as the row that drifts."""
        return Drifted(self.q_NV, -self.drift_NV, f"{self.what}, swapped")


Exact = Callable[[Drifted], Floats]
Bound = Callable[[Floats], Floats]


def tv(case: Drifted) -> Floats:
    return 0.5 * (case.p_NV * np.abs(np.expm1(case.log_ratio_NV))).sum(axis=1)


def kl(case: Drifted) -> Floats:
    """KL(p || q), in the form whose terms are all >= 0."""
    log_ratio_NV = case.log_ratio_NV
    return (case.p_NV * (np.expm1(log_ratio_NV) - log_ratio_NV)).sum(axis=1)


def chi2(case: Drifted) -> Floats:
    """E_p (q/p - 1)^2."""
    return (case.p_NV * np.expm1(case.log_ratio_NV) ** 2).sum(axis=1)


def hellinger2(case: Drifted) -> Floats:
    """1 - sum sqrt(p q), as half the squared distance of the roots."""
    return 0.5 * (case.p_NV * np.expm1(case.log_ratio_NV / 2) ** 2).sum(axis=1)


def abs_log_ratio(case: Drifted) -> Floats:
    return np.where(case.p_NV > 0, np.abs(case.log_ratio_NV), 0.0).max(axis=1)


def oscs(rng: np.random.Generator, n: int) -> Floats:
    """From two kernels of one format to unrelated ones, [n], nats."""
    return 10.0 ** rng.uniform(-3.0, 1.2, n)


def scattered(rng: np.random.Generator, n: int) -> Drifted:
    """Random rows, some without mass here and there, and random drifts."""
    p_NV = distributions(rng, n, _SIZE)
    return Drifted(p_NV, oscs(rng, n)[:, None] * rng.random((n, _SIZE)), "random drift")


def two_level(rng: np.random.Generator, mass_of: Bound, n: int) -> Drifted:
    """A drift of two levels, up on a set of tokens whose mass is a function of osc."""
    osc_N1 = oscs(rng, n)[:, None]
    mass_N1 = mass_of(osc_N1)
    half = _SIZE // 2
    up_NH, down_NH = distributions(rng, n, half), distributions(rng, n, half)
    p_NV = np.hstack([mass_N1 * up_NH, (1.0 - mass_N1) * down_NH])
    drift_NV = np.hstack([osc_N1 * np.ones_like(up_NH), np.zeros_like(down_NH)])
    return Drifted(p_NV, drift_NV, "two-level drift")


def climbed(rng: np.random.Generator, n: int, exact: Exact, bound: Bound) -> Drifted:
    """Random rows and drifts, each moved a step at a time to where exact / bound is larger."""
    best = Drifted(
        distributions(rng, n, _SIZE, zeros=False),
        oscs(rng, n)[:, None] * rng.random((n, _SIZE)),
        "climbed drift",
    )

    def height(case: Drifted) -> Floats:
        osc_N = case.osc_N
        some_N = osc_N > 1e-3
        return np.where(some_N, exact(case) / bound(np.where(some_N, osc_N, 1.0)), 0.0)

    best_N = height(best)
    for _ in range(_STEPS):
        mass_NV = best.p_NV * np.exp(rng.normal(0.0, 0.5, (n, _SIZE)))
        span_N1 = best.osc_N[:, None]
        moved_NV = best.drift_NV + span_N1 * rng.normal(0.0, 0.3, (n, _SIZE))
        lowest_N1 = best.drift_NV.min(axis=1, keepdims=True)
        moved_NV = np.clip(moved_NV, lowest_N1, lowest_N1 + span_N1)
        step = Drifted(mass_NV / mass_NV.sum(axis=1, keepdims=True), moved_NV, best.what)
        step_N = height(step)
        better_N1 = (step_N > best_N)[:, None]
        best = Drifted(
            np.where(better_N1, step.p_NV, best.p_NV),
            np.where(better_N1, step.drift_NV, best.drift_NV),
            best.what,
        )
        best_N = np.maximum(best_N, step_N)
    return best


def _against_osc(
    rng: np.random.Generator, n: int, exact: Exact, bound: Bound, mass_of: Bound
) -> Iterator[Trial]:
    third = -(-n // 3)
    for case in (
        scattered(rng, third),
        two_level(rng, mass_of, third),
        climbed(rng, third, exact, bound),
    ):
        for way in (case, case.swapped):
            yield Trial(exact(way), bound(case.osc_N), what=way.what)


def _tv_mass(osc: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(osc / 2))


@challenge("tv_from_osc")
def _tv(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    yield from _against_osc(rng, n, tv, tv_from_osc, _tv_mass)


@challenge("kl_from_osc")
def _kl(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    yield from _against_osc(rng, n, kl, kl_from_osc, lambda osc: 1.0 / osc - 1.0 / np.expm1(osc))


@challenge("chi2_from_osc")
def _chi2(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    yield from _against_osc(rng, n, chi2, chi2_from_osc, lambda osc: np.full_like(osc, 0.5))


@challenge("hellinger2_from_osc")
def _hellinger2(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    yield from _against_osc(rng, n, hellinger2, hellinger2_from_osc, _tv_mass)


@challenge("abs_log_ratio_from_osc")
def _abs_log_ratio(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """The rarer the tokens that drift, the nearer their log-ratio is to osc."""
    yield from _against_osc(
        rng, n, abs_log_ratio, abs_log_ratio_from_osc, lambda osc: 1e-3 * np.exp(-osc)
    )


@challenge("tv_from_log_ratio")
def _log_ratio(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Where osc is twice rho both levels lie rho away, and the bound of osc is attained."""
    half = -(-n // 2)
    for case in (scattered(rng, half), two_level(rng, _tv_mass, half)):
        yield Trial(tv(case), tv_from_log_ratio(abs_log_ratio(case)), what=case.what)


@challenge("log_ratio_bounds")
def _log_ratio_bounds(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """The first token of a row, anything from rare to nearly sure; alone up, alone down."""
    log1mp_N = -(10.0 ** rng.uniform(-1.0, 1.3, n))
    other_NV = distributions(rng, n, _SIZE - 1, zeros=False)
    p_NV = np.hstack([-np.expm1(log1mp_N)[:, None], np.exp(log1mp_N)[:, None] * other_NV])
    alone_NV = np.zeros_like(p_NV)
    alone_NV[:, 0] = oscs(rng, n) * rng.choice([-1.0, 1.0], n)
    for case in (scattered(rng, n), Drifted(p_NV, alone_NV, "one token drifts")):
        here_N = case.p_NV[:, 0] > 0
        p_M, other_M = case.p_NV[here_N, 0], case.p_NV[here_N, 1:].sum(axis=1)
        some_M = other_M > 0
        log1mp_M = np.where(some_M, np.log(np.where(some_M, other_M, 1.0)), -np.inf)
        low_M, high_M = log_ratio_bounds(
            np.minimum(np.log(p_M), 0.0), case.osc_N[here_N], np.minimum(log1mp_M, 0.0)
        )
        exact_M = case.log_ratio_NV[here_N, 0]
        up_M = exact_M > 0
        yield Trial(exact_M[up_M], high_M[up_M], what=f"{case.what}, up")
        yield Trial(-exact_M[~up_M], -low_M[~up_M], what=f"{case.what}, down")


@challenge("tv_from_osc_pmax")
def _tv_pmax(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Peaked rows whose other tokens all rise; the peak of either kernel will do."""
    half = -(-n // 2)
    rest_N1 = 10.0 ** rng.uniform(-9.0, 0.0, (half, 1)) / 2
    p_NV = np.hstack([1.0 - rest_N1, rest_N1 * distributions(rng, half, _SIZE - 1)])
    drift_NV = np.repeat(oscs(rng, half)[:, None], _SIZE, axis=1)
    drift_NV[:, 0] = 0.0
    for case in (scattered(rng, half), Drifted(p_NV, drift_NV, "all but the peak rise")):
        for way in (case, case.swapped):
            peak_N1 = way.p_NV.argmax(axis=1)[:, None]
            other_NV = way.p_NV.copy()
            np.put_along_axis(other_NV, peak_N1, 0.0, axis=1)
            rest_N = np.minimum(other_NV.sum(axis=1), 1.0)
            yield Trial(tv(way), tv_from_osc_pmax(case.osc_N, rest_N), what=way.what)
