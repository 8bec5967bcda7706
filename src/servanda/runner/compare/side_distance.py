# Which of two sides is further from a third scorer, on the tokens that all three scored.
#
# The distance of a side is the mean of |log p_side - log p_referee| over tokens, each at most CAP
# nats.  The difference of the two is a mean of bounded variables in the order of their draws, so
# LogMoment gives an interval for it whatever tokens depend on each other.
# Axes: N tokens.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.alpha import shared
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment

CAP = 1.0  # nats: one token counts no more
Floats = NDArray[np.float64]
Further = Literal["train", "infer", "cannot tell"]


@dataclass(frozen=True)
class SideDistance:
    """How far both sides are from the referee on one slice.

    Args:
        train, infer: their distances, nats per token.
        missing: tokens that some scorer has no logprob of.
        low, high: interval of train - infer for these tokens, at the confidence of all slices
            together.
    """

    slice: str
    tokens: int
    missing: int
    train: float
    infer: float
    low: float
    high: float

    @property
    def further(self) -> Further:
        """The side whose distance is larger for sure."""
        if self.low > 0:
            return "train"
        return "infer" if self.high < 0 else "cannot tell"


@dataclass(frozen=True)
class ThirdScore:
    """The answer of a third scorer.

    Args:
        rows, of: the rows that it was compared on, and all rows.
        slices: the whole first.
    """

    referee: str
    rows: int
    of: int
    confidence: float
    slices: tuple[SideDistance, ...]


def side_distances(
    train_N: Floats,
    infer_N: Floats,
    referee_N: Floats,
    slices: Mapping[str, NDArray[Any]],
    alpha: float,
) -> tuple[SideDistance, ...]:
    """The distances on each slice, in its order.

    Args:
        train_N, infer_N, referee_N: nats; NaN where there is none.
        slices: name -> tokens in it.
        alpha: probability that any of the intervals is wrong.
    """
    share = shared(shared(alpha, 2), len(slices))  # two ends on each slice
    far_N = {"train": _distance(train_N, referee_N), "infer": _distance(infer_N, referee_N)}
    return tuple(_on_slices(far_N, slices, share))


def _distance(side_N: Floats, referee_N: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        apart_N = np.where(side_N == referee_N, 0.0, np.abs(side_N - referee_N))
    return np.minimum(apart_N, CAP)


def _on_slices(
    far_N: Mapping[str, Floats], slices: Mapping[str, NDArray[Any]], share: float
) -> Iterator[SideDistance]:
    for name, inside_N in slices.items():
        train_N, infer_N = (far[inside_N] for far in far_N.values())
        known_N = ~np.isnan(train_N + infer_N)
        train_N, infer_N = train_N[known_N], infer_N[known_N]
        missing = int((~known_N).sum())
        unit = LogMoment.of((train_N - infer_N) / (2 * CAP) + 0.5, missing)
        low, high = interval(unit, share, about=0.5)
        yield SideDistance(
            slice=name,
            tokens=len(train_N),
            missing=missing,
            train=float(train_N.mean()) if len(train_N) else math.nan,
            infer=float(infer_N.mean()) if len(infer_N) else math.nan,
            low=(2 * low - 1) * CAP,
            high=(2 * high - 1) * CAP,
        )
