# What the field's thresholds say of the same tokens: averages that trainers log, and the
# values at which projects or their guides call them a fault.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from servanda.divergence.base import Floats, log_ratio
from servanda.divergence.k3 import k3

Average = Callable[[Floats, Floats], Floats]  # (logp_train_N, logp_infer_N) -> [N]


@dataclass(frozen=True)
class Threshold:
    """An average over tokens, the project that watches it, and where it rings."""

    name: str
    source: str
    limit: float
    of: Average


@dataclass(frozen=True)
class Reading:
    threshold: Threshold
    value: float

    @property
    def rings(self) -> bool:
        return not self.value <= self.threshold.limit

    def __str__(self) -> str:
        where = self.threshold
        return f"{where.name} {self.value:.3g} (limit {where.limit:g}, {where.source})"


def _absolute(train_N: Floats, infer_N: Floats) -> Floats:
    return np.abs(log_ratio(train_N, infer_N))


def _multiplied(train_N: Floats, infer_N: Floats) -> Floats:
    return np.exp(_absolute(train_N, infer_N))


def _probability(train_N: Floats, infer_N: Floats) -> Floats:
    return np.abs(np.exp(train_N) - np.exp(infer_N))


THRESHOLDS = (
    Threshold("mean |log ratio|", "slime", 0.1, _absolute),
    Threshold("mean |log ratio|", "miles", 0.03, _absolute),
    Threshold("token_mult_prob_error", "NeMo-RL", 1.05, _multiplied),
    Threshold("k3", "prime-rl", 0.015, k3),
    Threshold("k3", "NeMo-RL guide", 1e-3, k3),
    Threshold("probability difference", "verl FAQ", 0.01, _probability),
)


def readings(logp_train_N: Floats, logp_infer_N: Floats) -> tuple[Reading, ...]:
    """Every threshold on these tokens.

    Args:
        logp_train_N, logp_infer_N: usable tokens only, [N], nats, one at least.

    Raises:
        EvidenceError: shapes differ, or a token has no usable logprob.
    """
    with np.errstate(over="ignore"):
        return tuple(
            Reading(t, float(np.mean(t.of(logp_train_N, logp_infer_N)))) for t in THRESHOLDS
        )
