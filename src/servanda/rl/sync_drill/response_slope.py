# The response of the engine to the trainer: a slope and a residual.
#
# Axes: N scored tokens, P parts that were changed together.
# A change is logp after minus logp before, of one side, on the same tokens, in nats.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servanda.theory.sampling import Floats

# smallest noise floor, nats: the resolution of logprobs of -10 in float32
RESOLUTION = 1e-5
_ALONE = 1e-9  # least share of a token's fit that the other tokens have


@dataclass(frozen=True)
class ResponseSlope:
    """The regression of the engine's change on the trainer's.

    Args:
        follow: the slope of engine on trainer: 1 is synced, 0 is not synced.
        spread: its standard error for independent tokens; the larger of the usual one and HC3, for
            noise that grows with a token's change, and a token that dominates the others.
        residual_nats: mean distance of the engine's change from slope times the trainer's.
    """

    follow: float
    spread: float
    residual_nats: float


def distance(logp_a_N: Floats, logp_b_N: Floats) -> float:
    """Mean |a - b|, nats.

    >>> distance(np.array([-1.0, -2.0]), np.array([-1.5, -2.5]))
    0.5
    """
    return float(np.abs(logp_a_N - logp_b_N).mean())


def tokens_of(part_N: Floats) -> float:
    """The effective number of tokens that a part changes: of n equal changes, n.

    >>> tokens_of(np.array([0.0, 2.0, -2.0, 0.0])), tokens_of(np.zeros(3))
    (2.0, 0.0)
    """
    square = float(part_N @ part_N)
    return float(np.abs(part_N).sum()) ** 2 / square if square else 0.0


def response_slope(train_N: Floats, infer_N: Floats) -> ResponseSlope:
    """The least-squares slope through zero of the engine's change on the trainer's.

    Args:
        train_N: change of the trainer's logprobs, [N], nats; not all zero.
        infer_N: change of the engine's, same tokens.

    >>> response_slope(np.array([1.0, -2.0, 1.0]), np.array([0.5, -1.0, 0.5])).follow
    0.5
    """
    square = float(train_N @ train_N)
    slope = float(train_N @ infer_N) / square
    rest_N = infer_N - slope * train_N
    even = rest_N @ rest_N / max(rest_N.size - 1, 1) / square
    left_N = rest_N / np.maximum(1 - train_N**2 / square, _ALONE) * train_N
    uneven = left_N @ left_N / square**2
    return ResponseSlope(slope, float(np.sqrt(max(even, uneven))), float(np.abs(rest_N).mean()))


def part_slopes(
    parts_PN: Sequence[Floats], train_N: Floats, infer_N: Floats
) -> tuple[tuple[float, float], ...]:
    """The response slopes of several parts that were changed together.

    The difference infer - train is regressed on the effect of each part alone: a synced part has
    coefficient 0, one that is not synced -1.  In this form, interactions of parts reduce precision
    only if a part is not synced.

    Args:
        parts_PN: the trainer's change with only that part changed.
        train_N: the trainer's change with all of them changed.
        infer_N: the engine's.

    Returns:
        (follow, its standard error) of each part, as in ResponseSlope; (nan, inf) for parts that
        cannot be distinguished.

    Source:
        J. MacKinnon and H. White, Some heteroskedasticity-consistent covariance matrix estimators
        with improved finite sample properties, 1985 (HC3, nearly the jackknife).

    >>> x, y = np.array([1.0, 0.0, 2.0, 1.0]), np.array([0.0, 3.0, 1.0, -1.0])
    >>> [round(follow, 6) for follow, _ in part_slopes([x, y], x + y, x)]
    [1.0, 0.0]
    """
    parts_NP = np.stack(parts_PN, axis=1)
    lack_N = infer_N - train_N
    norm_P = np.sqrt((parts_NP**2).sum(axis=0))
    known = norm_P > 0
    unit_NP = parts_NP[:, known] / norm_P[known]
    slope_P, _, rank, _ = np.linalg.lstsq(unit_NP, lack_N, rcond=1e-8)
    if rank < unit_NP.shape[1]:
        return tuple((float("nan"), float("inf")) for _ in parts_PN)
    rest_N = lack_N - unit_NP @ slope_P
    inverse_PP = np.linalg.inv(unit_NP.T @ unit_NP)
    even_P = rest_N @ rest_N / max(rest_N.size - unit_NP.shape[1], 1) * np.diag(inverse_PP)
    # as if each token in turn were left out: a token that dominates a part has little rest itself
    weight_NP = unit_NP @ inverse_PP
    alone_N = (weight_NP * unit_NP).sum(axis=1)
    left_N = rest_N / np.maximum(1 - alone_N, _ALONE)
    uneven_P = ((weight_NP * left_N[:, None]) ** 2).sum(axis=0)
    follow_P = np.full(len(parts_PN), np.nan)
    spread_P = np.full(len(parts_PN), np.inf)
    follow_P[known] = 1 + slope_P / norm_P[known]
    spread_P[known] = np.sqrt(np.maximum(even_P, uneven_P)) / norm_P[known]
    return tuple((float(f), float(s)) for f, s in zip(follow_P, spread_P, strict=True))
