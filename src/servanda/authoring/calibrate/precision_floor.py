# Precision floor: the value of a metric from rounding of the recorded logprobs alone.
#
# For two identical kernels with the logprobs of one rounded, the error of each log ratio is uniform
# on [-eta, eta] and independent between tokens.

from __future__ import annotations

import math

import numpy as np

from servanda.authoring.calibrate.resample import Resampled
from servanda.judgement.clauses.clip_ratio import RatioBudget
from servanda.judgement.clauses.gradient import AnswerGap, Gap
from servanda.judgement.clauses.sequences import RewardDrift
from servanda.theory.bounds.gradient import loss_weights, ratio_budget
from servanda.theory.bounds.importance_weights import weight_gap
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.precision import capture_floor, eta

_GRID = 2049


def record_floor(later: Resampled, capture: str) -> float | None:
    """The effect of rounding alone, in the unit of the metric, for responses of these lengths.

    A reward drift uses a normal approximation of the sum of errors: 8 % too low for responses of
    one token, 1 % for eight.

    Args:
        capture: what logprobs are recorded in.

    Returns:
        None if unknown for the metric.
    """
    kind, clause = later.kind, later.cell.clause
    if clause.metric in DIVERGENCES:
        return capture_floor(clause.metric, capture, clause.aggregate or "mean")
    error_N = np.linspace(-1.0, 1.0, _GRID) * eta(capture)
    if isinstance(kind, RatioBudget):
        budget = ratio_budget(np.abs(error_N), *kind.clip_range)  # type: ignore[attr-defined]
        used_N = np.where(error_N > 0, budget.used_up, budget.used_down)
        return float(used_N.max() if kind.feed.threshold is not None else used_N.mean())
    lengths = np.concatenate([view.pair.infer.length_S for view in later.rounds.own])
    lengths = lengths[lengths > 0]
    if isinstance(kind, Gap):
        # errors are symmetric, and weights above 1 may give a negative value
        token = kind.factor * max(float(weight_gap(error_N, kind.psi).mean()), 0.0)
        if not isinstance(kind, AnswerGap) or not len(lengths):
            return token
        return token * float(loss_weights(kind.loss, lengths).sum()) / len(lengths)
    if isinstance(kind, RewardDrift):
        drifts = [_drift(eta(capture) * math.sqrt(n / 3)) for n in lengths.tolist()]
        return kind.feed.scale * float(np.mean(drifts)) if drifts else 0.0
    return None


def _drift(sigma: float) -> float:
    """E (1 - exp S)^+ of a normal S with mean 0."""
    return 0.5 - 0.5 * math.exp(sigma**2 / 2) * math.erfc(sigma / math.sqrt(2))
