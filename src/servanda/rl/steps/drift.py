# The drift of a run: sums per training step, the first step of a lasting violation, and the trend
# from the first to the last steps.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ENDS = 5  # steps at each end of a run for the trend
GROWS, DOUBLED = 1.5, 2.0  # trend ratios of a warning and of an error
_RESAMPLES = 2000
_TAIL = 0.025


@dataclass(frozen=True)
class TokenSum:
    """A sum over tokens, and the number of tokens."""

    total: float = 0.0
    n: int = 0

    def __add__(self, other: TokenSum) -> TokenSum:
        return TokenSum(self.total + other.total, self.n + other.n)

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None


@dataclass
class StepDrift:
    """One training step.

    Args:
        cells: index of a cell -> sum of x.
        groups: prompt group -> sum of |log ratio|, nats.
    """

    step: int
    sequences: int = 0
    tokens: int = 0
    cells: dict[int, TokenSum] = field(default_factory=dict)
    groups: dict[str, TokenSum] = field(default_factory=dict)

    def add(self, cell: int, total: float, n: int) -> None:
        self.cells[cell] = self.cells.get(cell, TokenSum()) + TokenSum(total, n)

    def add_groups(self, groups: Mapping[str, TokenSum]) -> None:
        for name, drift in groups.items():
            self.groups[name] = self.groups.get(name, TokenSum()) + drift

    def mean(self, cell: int) -> float | None:
        """Mean x of a cell; None without tokens."""
        return self.cells.get(cell, TokenSum()).mean


def since(means: Sequence[tuple[int, float | None]], limit: float) -> int | None:
    """The first step after which every mean exceeds the limit; None if the last does not.

    Args:
        means: (step, mean) in the order of the steps; None: the step has no such token and is
            skipped.

    >>> since([(1, 0.0), (2, 0.3), (3, 0.1), (4, 0.2), (5, None), (6, 0.4)], 0.15)
    4
    >>> since([(1, 0.3), (2, 0.1)], 0.15)
    """
    first = None
    for step, mean in means:
        if mean is None:
            continue
        if not mean > limit:
            first = None
        elif first is None:
            first = step
    return first


@dataclass(frozen=True)
class Trend:
    """Mean |log ratio| of the last steps over that of the first; an estimate.

    Args:
        ratio: ratio of the means.
        interval: 95 %, from resampled prompt groups.
        steps: number of last steps in the comparison, at most five.
    """

    ratio: float
    interval: tuple[float, float]
    steps: int

    @property
    def level(self) -> str:
        """ "error" from x2, "warning" from x1.5, if the interval is above 1; else ""."""
        if self.interval[0] <= 1:
            return ""
        return "error" if self.ratio >= DOUBLED else "warning" if self.ratio >= GROWS else ""


@dataclass
class RunEnds:
    """The first and the last ENDS steps of a run, without overlap; fewer for a short run."""

    first: list[StepDrift] = field(default_factory=list)
    last: list[StepDrift] = field(default_factory=list)

    @property
    def newest(self) -> StepDrift | None:
        return next(reversed(self.last or self.first), None)

    def add(self, step: StepDrift) -> StepDrift | None:
        """Add a step; a repeated step replaces the earlier one.

        Returns:
            The step that is no longer at an end.
        """
        for end in (self.first, self.last):
            for i, known in enumerate(end):
                if known.step == step.step:
                    end[i] = step
                    return None
        (self.first if len(self.first) < ENDS else self.last).append(step)
        return self.last.pop(0) if len(self.last) > ENDS else None

    def add_groups(self, number: int, groups: Mapping[str, TokenSum], *, anew: bool) -> None:
        """Add prompt groups to a step.

        A step before the newest replaces all steps from it on.

        Args:
            anew: whether the newest step is replaced too.
        """
        newest = self.newest
        if newest is not None and (number < newest.step or (anew and number == newest.step)):
            self.first = [step for step in self.first if step.step < number]
            self.last = [step for step in self.last if step.step < number]
            newest = self.newest
        if newest is None or newest.step != number:
            newest = StepDrift(number)
            self.add(newest)
        newest.add_groups(groups)

    def copied(self) -> RunEnds:
        """A snapshot, without steps that are added later."""
        return RunEnds([*self.first], [*self.last])

    @property
    def ratio(self) -> float | None:
        """The ratio of the last steps to the first ENDS; None if there are too few."""
        if len(self.first) < ENDS or not self.last:
            return None
        before, after = (_mean(end) or 0.0 for end in (self.first, self.last))
        return after / before if before else None

    def trend(self, *, least: int = ENDS) -> Trend | None:
        return trend(self.first, self.last, least=least)

    def to_plain(self) -> dict[str, Any]:
        """Both ends as plain data for a state file."""
        return {"first": [*map(_plain, self.first)], "last": [*map(_plain, self.last)]}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RunEnds:
        return cls([*map(_from_plain, data["first"])], [*map(_from_plain, data["last"])])


def _mean(steps: Sequence[StepDrift]) -> float | None:
    groups = [group for step in steps for group in step.groups.values()]
    return TokenSum(sum(g.total for g in groups), sum(g.n for g in groups)).mean


def _plain(step: StepDrift) -> list[Any]:
    return [step.step, [[name, drift.total, drift.n] for name, drift in step.groups.items()]]


def _from_plain(data: Any) -> StepDrift:
    number, groups = data
    return StepDrift(number, groups={name: TokenSum(total, n) for name, total, n in groups})


def trend(
    first: Sequence[StepDrift], last: Sequence[StepDrift], *, least: int = ENDS
) -> Trend | None:
    """The ratio of the drift of the last steps to that of the first.

    Prompt groups are resampled at each end, because tokens of one prompt are dependent.  None if
    there are fewer than ENDS first steps or `least` last ones, an end has fewer than two prompt
    groups, or the first steps have no drift.

    Source:
        B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, §8.3 (two samples).
    """
    ends = [[g for step in end for g in step.groups.values() if g.n] for end in (first, last)]
    if len(first) < ENDS or len(last) < least or min(map(len, ends)) < 2:
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
    return Trend(float(means[1] / means[0]), (float(low), float(high)), len(last))
