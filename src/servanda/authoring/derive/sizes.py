# Sizes: the samples needed to decide a budget, before any measurement.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.reachable import Z, reach

MOST = 100_000  # default limit of prompt groups of a run
_ROUND = 64  # of a workload
_FIRST = 256  # fewest prompt groups for `holds`, in a larger run
_GUARD = 5_000  # tokens in which sampler_fidelity detects a hidden top-p of 0.95
_FILL = 0.5  # share of the allowed tokens that responses use
_ENDLESS = 1e12


@dataclass(frozen=True)
class Requirement:
    """The parameters of a clause's certificate.

    Args:
        limit, best: of the mean of x in [0, 1]: the limit, and the value of identical kernels
            (above 0 for a signed value).
        each: the unit that has a value.
        variance: estimated variance of x, for values close to `best`; None: x is 0 or 1, the worst
            case.
        sides: number of certified ends; each has a share of alpha.
    """

    limit: float
    best: float = 0.0
    each: Literal["token", "sequence"] = "sequence"
    variance: float | None = None
    sides: int = 1

    @classmethod
    def of(
        cls,
        limit: float,
        span: tuple[float, float],
        each: Literal["token", "sequence"],
        scatter: float | None = None,
    ) -> Requirement:
        """From a value's range and standard deviation, in its own units."""
        low, high = span
        scale = high - low
        variance = None if scatter is None or low == 0 else (scatter / scale) ** 2
        return cls((limit - low) / scale, -low / scale, each, variance)

    def units(self, *, alpha: float, cells: int, fill: float = 1.0) -> float:
        """Units with which nine of ten runs decide half the budget, and twice of it."""
        alpha = shared(alpha, self.sides)
        half = (self.limit + self.best) / 2
        twice = min(2 * self.limit - self.best, (1 + self.limit) / 2)

        def decides(n: int) -> bool:
            reachable = reach(n, self.limit, alpha=alpha, cells=cells, fill=fill, best=self.best)
            low, high = reachable.holds, reachable.violated
            if self.variance is not None:
                low, high = reachable.holds_even, reachable.violated_even
            return low is not None and low >= half and high is not None and high <= twice

        n = 64
        while not decides(n):
            n *= 2
            if n > _ENDLESS:
                return math.inf
        low, high = n // 2, n
        while high - low > max(n // 256, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if decides(middle) else (middle, high)
        if self.variance is None:
            return high
        price = log_price(shared(alpha, cells))
        # standard errors between half and the limit: log evidence of their half square, less Z
        errors = Z + math.sqrt(Z**2 + 2 * price)
        return max(high, self.variance * (errors / (self.limit - half)) ** 2)


@dataclass(frozen=True)
class RunSize:
    """The size of a run.

    Args:
        alpha: alpha of a first attempt.
        tokens: most new tokens of a response; lines: most, and mean, lines of a group.
        most: prompt groups that a run may have.
    """

    alpha: float
    claim: str
    tokens: int
    lines: tuple[int, float]
    most: int

    def groups(self, requirement: Requirement, cells: int) -> float:
        """Prompt groups with which nine of ten runs decide a clause."""
        per_token = requirement.each == "token"
        if self.claim == "population":
            fill = self.lines[1] / self.lines[0] * (_FILL if per_token else 1.0)
            return requirement.units(alpha=self.alpha, cells=cells, fill=fill)
        each = self.lines[1] * (self.tokens * _FILL if per_token else 1.0)
        return requirement.units(alpha=self.alpha, cells=cells) / each

    def offline(self, expected: float) -> tuple[int, int]:
        """The first evaluation and the limit of a run with this expected number of groups."""
        tokens = self.lines[1] * self.tokens * _FILL
        first = max(math.ceil(_GUARD / tokens / _ROUND) * _ROUND, _FIRST)
        last = max(math.ceil(expected / _ROUND) * _ROUND, first)
        last = min(last, self.most)
        return min(first, last), last
