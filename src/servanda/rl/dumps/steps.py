# Steps: since when a slice is beyond its limit, and whether the drift grows.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WORST = 0.3  # of the tokens, those of the sequences that drift most
ENDS = 5  # steps at each end of a dump that a trend compares
_RESAMPLES = 2000
_TAIL = 0.025


@dataclass(frozen=True)
class GroupSums:
    """Of one prompt group at one step: sum of |log ratio|, nats, and tokens."""

    total: float = 0.0
    n: int = 0

    def __add__(self, other: GroupSums) -> GroupSums:
        return GroupSums(self.total + other.total, self.n + other.n)


@dataclass
class Step:
    """One step of a dump: of each cell the sum of x and its tokens, and its prompt groups.

    Args:
        drift: sum of |log ratio|, nats, and tokens of each sequence.
    """

    step: int
    sequences: int = 0
    tokens: int = 0
    cells: dict[int, list[float]] = field(default_factory=dict)
    groups: dict[str, GroupSums] = field(default_factory=dict)
    drift: list[tuple[float, int]] = field(default_factory=list)

    def add(self, cell: int, total: float, n: int) -> None:
        sums = self.cells.setdefault(cell, [0.0, 0])
        sums[0] += total
        sums[1] += n

    def mean(self, cell: int) -> float | None:
        """Mean x of a cell; None where the step met none of it."""
        total, n = self.cells.get(cell, (0.0, 0))
        return total / n if n else None


def since(means: Sequence[tuple[int, float | None]], limit: float) -> int | None:
    """The first step from which on every mean is beyond the limit; None where the last is not.

    Args:
        means: (step, mean) in the order of the steps; None: the step has no such token, and
            says nothing.

    >>> since([(1, 0.0), (2, 0.3), (3, 0.1), (4, 0.2), (5, None), (6, 0.4)], 0.15)
    4
    >>> since([(1, 0.3), (2, 0.1)], 0.15)
    """
    found = None
    for step, mean in means:
        if mean is None:
            continue
        if not mean > limit:
            found = None
        elif found is None:
            found = step
    return found


@dataclass(frozen=True)
class Trend:
    """Mean |log ratio| of the last steps over that of the first; an estimate.

    Args:
        interval: from resampled prompt groups, 95 %.
    """

    ratio: float
    interval: tuple[float, float]
    steps: int


def trend(first: Sequence[Step], last: Sequence[Step], *, least: int = ENDS) -> Trend | None:
    """How the drift of the last steps compares with that of the first.

    Prompt groups are resampled at each end, for the tokens of one prompt share their fate.
    None where an end has fewer than `least` steps or two prompt groups, or the first no drift.

    Source:
        B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, §8.3 (two samples).
    """
    ends = [[g for step in end for g in step.groups.values() if g.n] for end in (first, last)]
    if min(len(first), len(last)) < least or min(map(len, ends)) < 2:
        return None
    rng = np.random.default_rng(0)
    means, resampled = [], []
    for groups in ends:
        total_G, n_G = np.array([(g.total, g.n) for g in groups], dtype=np.float64).T
        counts_RG = rng.multinomial(len(groups), [1 / len(groups)] * len(groups), _RESAMPLES)
        means.append(math.fsum(total_G) / n_G.sum())
        resampled.append((counts_RG @ total_G) / (counts_RG @ n_G))
    if not (means[0] and (resampled[0] > 0).all()):
        return None
    low, high = np.quantile(resampled[1] / resampled[0], [_TAIL, 1 - _TAIL])
    return Trend(means[1] / means[0], (float(low), float(high)), len(last))


def concentration(steps: Sequence[Step]) -> float | None:
    """The share of |log ratio| in the worst sequences that hold WORST of a step's tokens.

    Near WORST where all sequences drift alike, near 1 where few of them do.  None where no step
    has a sequence that drifts.
    """
    worst = whole = 0.0
    for step in steps:
        total_S, n_S = np.array(step.drift, dtype=np.float64).reshape(-1, 2).T
        order_S = np.argsort(-total_S / np.maximum(n_S, 1), kind="stable")
        # the last of them counts in part, so that the tokens are exactly WORST of all
        before_S = n_S[order_S].cumsum() - n_S[order_S]
        part_S = np.clip((WORST * n_S.sum() - before_S) / np.maximum(n_S[order_S], 1), 0, 1)
        worst += float(part_S @ total_S[order_S])
        whole += float(total_S.sum())
    return worst / whole if whole else None
