# Challenges of truncation: rows that drift at random and to the corners, through the very
# transform that kernels sample with.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.random_kernels import distributions
from benchmarks.theory.theorems.truncation import truncation_sets, tv_truncated_interval
from servanda.theory.bounds.drift import tv_from_osc
from servanda.theory.sampling import Sampling, processed_logprobs

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_SIZE = 6
_RANDOM = 16  # drifts of a row at random, beside those at its corners
_OSCS = (1e-3, 5.0)  # least and largest drift among which a border is looked for
_BESIDE = 1e-4  # how far beside it, as a share


def _filters(rng: np.random.Generator) -> dict[str, Any]:
    """Any of the filters, alone and together."""
    made: dict[str, Any] = {}
    if rng.random() < 0.6:
        made["top_k"] = int(rng.integers(1, _SIZE + 1))
    if rng.random() < 0.6:
        made["top_p"] = float(rng.uniform(0.05, 1.0))
    if rng.random() < 0.4:
        made["min_p"] = float(10.0 ** rng.uniform(-2.0, -0.1))
    return made


def _rows(rng: np.random.Generator, n: int) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(distributions(rng, n, _SIZE))


def worst_drifts(row_V: Floats, osc: float) -> Floats:
    """For each token the drifts that push it out and pull it in, and all of two levels, [D, V].

    Out: what can pass it rises, all else stays.  In: it rises with all that is not ahead of
    it for certain, each no further than it.
    """
    finite_V = np.where(np.isfinite(row_V), row_V, -1e3)
    gap_VV = finite_V[None, :] - finite_V[:, None]  # of each column over the token of a row
    shy = osc * (1.0 - 1e-9)
    out_VV = np.where(gap_VV >= -shy, shy, 0.0)
    np.fill_diagonal(out_VV, 0.0)
    in_VV = np.where(gap_VV > shy, 0.0, shy - np.maximum(gap_VV, 0.0) * (1.0 + 1e-9))
    bits_DV = (np.arange(2**_SIZE)[:, None] >> np.arange(_SIZE)) & 1
    up_DV = np.where(bits_DV == 1, shy, 0.0)
    return np.vstack([out_VV, np.clip(in_VV, 0.0, shy), up_DV])


@challenge("truncation_sets")
def _truncation_sets(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """What some drift kept is possible, and what is sure was kept under every drift."""
    cases = -(-n // (2 * _SIZE))
    some, every, sure, possible = [], [], [], []
    for row_V in _rows(rng, cases):
        filters = _filters(rng)
        osc = float(10.0 ** rng.uniform(-3.0, 0.7))
        drift_DV = np.vstack(
            [worst_drifts(row_V, osc), osc * rng.random((_RANDOM, _SIZE)), np.zeros((1, _SIZE))]
        )
        kept_DV = np.isfinite(processed_logprobs(row_V + drift_DV, Sampling(**filters)))
        some.append(kept_DV.any(axis=0))
        every.append(kept_DV.all(axis=0))
        sets = truncation_sets(row_V, osc, **filters)
        sure.append(sets.sure)
        possible.append(sets.possible)
    some_N, every_N = np.concatenate(some) * 1.0, np.concatenate(every) * 1.0
    yield Trial(some_N, np.concatenate(possible) * 1.0, what="kept by some row")
    yield Trial(every_N, np.concatenate(sure) * 1.0, "at least", "kept by every row")
    yield from _borders(rng, cases // 2)


def _borders(rng: np.random.Generator, cases: int) -> Iterator[Trial]:
    """Rows at the very osc where a token begins to be lost or kept, and just beside it.

    Of filters for which the sets are exact: equal on both sides of the border.
    """
    found: dict[str, list[tuple[Bools, Bools]]] = {"kept by some": [], "kept by every": []}
    for row_V in _rows(rng, cases):
        filters = _filters(rng)
        if len(filters) > 1:
            filters.pop("min_p", None)
        border = _border(rng, row_V, Sampling(**filters))
        if border is None:
            continue
        for osc in (border * (1.0 - _BESIDE), border * (1.0 + _BESIDE)):
            some_V, every_V = _kept(row_V, osc, Sampling(**filters))
            sets = truncation_sets(row_V, osc, **filters)
            found["kept by some"].append((some_V, sets.possible))
            found["kept by every"].append((every_V, sets.sure))
    for what, pairs in found.items():
        exact_N, said_N = (np.concatenate(side) * 1.0 for side in zip(*pairs, strict=True))
        yield Trial(exact_N, said_N, "equal", f"at a border, {what} row")


def _kept(row_V: Floats, osc: float, sampling: Sampling) -> tuple[Bools, Bools]:
    """What some of the worst drifts keeps, and what all of them keep."""
    moved_DV = np.vstack([row_V + worst_drifts(row_V, osc), row_V])
    kept_DV = np.isfinite(processed_logprobs(moved_DV, sampling))
    return np.logical_or.reduce(kept_DV), np.logical_and.reduce(kept_DV)


def _border(rng: np.random.Generator, row_V: Floats, sampling: Sampling) -> float | None:
    """The osc at which what drifts keep changes for one token; None where it does not."""
    low, high = (math.log(osc) for osc in _OSCS)
    near, far = (np.concatenate(_kept(row_V, osc, sampling)) for osc in _OSCS)
    changed = np.flatnonzero(near != far)
    if not len(changed):
        return None
    one = rng.choice(changed)
    while high - low > _BESIDE / 10:
        middle = (low + high) / 2
        same = np.concatenate(_kept(row_V, math.exp(middle), sampling))[one] == near[one]
        low, high = (middle, high) if same else (low, middle)
    return math.exp(high)


@challenge("tv_truncated_interval")
def _tv_truncated(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    exact_N, alpha_N, beta_N, common_N, osc_N = np.zeros((5, n))
    for i, row_V in enumerate(_rows(rng, n)):
        sampling = Sampling(**_filters(rng))
        osc = float(10.0 ** rng.uniform(-3.0, 0.7))
        drift_V = osc * rng.random(_SIZE)
        train_V, infer_V = np.exp(processed_logprobs(np.stack([row_V, row_V + drift_V]), sampling))
        both_V = (train_V > 0) & (infer_V > 0)
        exact_N[i] = 0.5 * np.abs(train_V - infer_V).sum()
        alpha_N[i] = min(train_V[~both_V].sum(), 1.0)
        beta_N[i] = min(infer_V[~both_V].sum(), 1.0)
        if both_V.any():
            common_V = train_V[both_V] / train_V[both_V].sum()
            common_N[i] = 0.5 * np.abs(common_V - infer_V[both_V] / infer_V[both_V].sum()).sum()
            osc_N[i] = np.ptp(drift_V[both_V])
    low_N, high_N = tv_truncated_interval(alpha_N, beta_N, common_N)
    yield Trial(exact_N, low_N, "at least", "the sets alone")
    yield Trial(exact_N, high_N, what="the rows where both keep")
    _, high_N = tv_truncated_interval(alpha_N, beta_N, tv_from_osc(osc_N))
    yield Trial(exact_N, high_N, what="the osc where both keep")
