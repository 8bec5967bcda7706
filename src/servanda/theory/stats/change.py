# Change against good runs: a CUSUM, with its threshold from ranks of whole runs.
#
# x is standardised by good runs, z = (x - centre) / scale, and S = max(0, S + min(z, CLIP) - 1)
# (E. S. Page, Continuous Inspection Schemes, Biometrika 1954).  For each good run j there is a
# fold: centre and scale of the *other* good runs, and the largest S of run j under them.  A run is
# called changed where S is above MARGIN times that in every fold at once.  Among R + 1
# exchangeable runs at most one is above all others in this sense, so a healthy run is called
# changed with probability at most 1 / (R + 1), whatever the dependence, drift and tails of its
# steps (the argument of R. F. Barber et al., Predictive inference with the jackknife+, Ann. Stat.
# 2021).  An e-detector (Shin, Ramdas, Rinaldo 2022) would need a bound on the mean of each step
# given the past, which a few good runs do not show.
#
# Axes: R runs, T steps, M metrics, F folds, D directions (0 up, 1 down).

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.alpha import shared

Array = NDArray[np.float64]

ALLOWANCE = 1.0  # scales of a lasting change that are never called one
CLIP = 4.0  # scales that one step counts at most, so that a heavy tail is no change
MARGIN = 1.2  # factor above the largest S of a good run
LEAST_STEPS = 5  # of a good run with a value
_OVERSHOOT = 1.166  # of a normal random walk over a barrier, both barriers together


@dataclass(frozen=True)
class Fold:
    """The view of one good run from the others.

    Args:
        centre_M, scale_M: of the other good runs; threshold: of S, for all metrics together.
    """

    centre_M: tuple[float, ...]
    scale_M: tuple[float, ...]
    threshold: float


@dataclass(frozen=True)
class Detector:
    """Finds a change against good runs.

    Args:
        sides: of each metric the directions of a change: 1 up, -1 down, 0 both.
        runs: number of good runs; steps: of the shortest.
    """

    folds: tuple[Fold, ...]
    sides: tuple[int, ...]
    runs: int
    steps: int

    @property
    def false_alarms(self) -> float | None:
        """Largest probability that a healthy run is called changed within `steps` steps.

        None for one good run, which shows no spread over runs: its threshold is an estimate.
        """
        return 1 / (self.runs + 1) if self.runs > 1 else None

    def start(self) -> Array:
        """S before the first step, [F, D, M]."""
        return np.zeros((len(self.folds), 2, len(self.sides)))

    def advance(self, state_FDM: Array, x_M: ArrayLike) -> Array:
        """S after a step; a metric without a value (NaN) keeps its S.

        S is cut off one clipped step above the threshold, so that a repaired run recovers.
        """
        x_M = np.asarray(x_M, dtype=np.float64)
        most_F = [fold.threshold + CLIP for fold in self.folds]
        centre_FM = np.array([fold.centre_M for fold in self.folds])
        scale_FM = np.array([fold.scale_M for fold in self.folds])
        after_FDM = _advanced(state_FDM, (x_M - centre_FM) / scale_FM, self.sides)
        return np.minimum(after_FDM, np.array(most_F)[:, None, None])

    def values(self, state_FDM: Array) -> Array:
        """S of each metric as a multiple of its threshold, in the fold with the least, [M].

        Above 1: a change.
        """
        threshold_F = np.array([fold.threshold for fold in self.folds])
        return (state_FDM.max(axis=1) / threshold_F[:, None]).min(axis=0)

    def delay(self, scales: float = CLIP) -> float:
        """Steps after which a lasting change of some scales is called one; inf: never."""
        each = min(scales, CLIP) - ALLOWANCE
        most = max(fold.threshold for fold in self.folds)
        return math.floor(most / each) + 1 if each > 0 else math.inf


def detector(
    runs: Sequence[ArrayLike], sides: Sequence[int], least_M: Sequence[float], alpha: float
) -> Detector:
    """The detector of a change against good runs.

    With one run, its two halves take the place of runs, and nothing is promised.

    Args:
        runs: of each good run the values of its steps, [T, M]; NaN: not measured.
        sides: as in Detector.
        least_M: smallest scale of each metric.
        alpha: probability of a false alarm per run if steps were independent and normal, which
            bounds the thresholds from below; (0, 1).

    Raises:
        EvidenceError: no run, or a metric with fewer than LEAST_STEPS values in a run.
    """
    series = [np.asarray(run, dtype=np.float64) for run in runs]
    if not series or any((np.isfinite(s).sum(axis=0) < LEAST_STEPS).any() for s in series):
        raise EvidenceError(
            f"a good run needs {LEAST_STEPS} steps with a value of every metric",
            hint="leave the run or the metric out",
        )
    steps = min(map(len, series))
    charts = sum(2 if side == 0 else 1 for side in sides)
    floor = least_threshold(steps, shared(alpha, charts))
    parts = series if len(series) > 1 else np.array_split(series[0], 2)
    folds = []
    for j, own in enumerate(parts):
        others = np.concatenate([part for i, part in enumerate(parts) if i != j])
        centre_M, scale_M = _standard(others, least_M)
        state_DM, most = np.zeros((2, len(sides))), 0.0
        for z_M in (own - centre_M) / scale_M:
            state_DM = _advanced(state_DM, z_M, sides)
            most = max(most, float(state_DM.max()))
        folds.append(Fold(tuple(centre_M), tuple(scale_M), max(MARGIN * most, floor)))
    return Detector(tuple(folds), tuple(sides), len(series), steps)


def least_threshold(steps: int, alpha: float) -> float:
    """The threshold of S at which independent normal steps have one false alarm in steps / alpha.

    Source:
        D. Siegmund, Sequential Analysis, 1985, §II.6: the mean run length of a CUSUM with its
        correction for the overshoot.

    >>> round(least_threshold(29, 0.05), 2)
    2.37
    """
    least = steps / alpha

    def length(h: float) -> float:
        b = 2 * ALLOWANCE * (h + _OVERSHOOT)
        return (math.expm1(b) - b) / (2 * ALLOWANCE**2)

    low, high = 0.0, 1.0
    while length(high) < least:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if length(middle) < least else (low, middle)
    return high


def _standard(x_TM: Array, least_M: Sequence[float]) -> tuple[Array, Array]:
    """Mean and standard deviation of the finite values."""
    known_TM = np.where(np.isfinite(x_TM), x_TM, np.nan)
    scale_M = np.nan_to_num(np.nanstd(known_TM, axis=0, ddof=1))
    return np.nanmean(known_TM, axis=0), np.maximum(scale_M, least_M)


def _advanced(state: Array, z: Array, sides: Sequence[int]) -> Array:
    """S after a step, [..., D, M]."""
    both = np.stack([z, -z], axis=-2)
    after = np.maximum(state + np.minimum(both, CLIP) - ALLOWANCE, 0.0)
    watched = np.array([[side >= 0 for side in sides], [side <= 0 for side in sides]])
    return np.where(np.isnan(both), state, np.where(watched, after, 0.0))
