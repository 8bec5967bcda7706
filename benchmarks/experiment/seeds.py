# Numbers over a few seeds: each of them, and an interval.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# two-sided 95 % quantiles of Student's t by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Spread:
    """One number of each seed.

    Raises:
        ValueError: no seed, or more than there are quantiles for.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.values) <= len(_T) + 1:
            raise ValueError(f"{len(self.values)} seeds, and this knows 1 to {len(_T) + 1}")

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, Student's t, for normally distributed seeds; None of one seed."""
        n = len(self.values)
        if n < 2:
            return None
        spread = math.fsum((value - self.mean) ** 2 for value in self.values)
        half = _T[n - 2] * math.sqrt(spread / (n - 1) / n)
        return self.mean - half, self.mean + half

    def minus(self, other: Spread) -> Spread:
        """Differences seed by seed."""
        pairs = zip(self.values, other.values, strict=True)
        return Spread(tuple(a - b for a, b in pairs))

    def told(self, digits: int = 2, *, signed: bool = False) -> str:
        """Mean and interval.

        >>> Spread((0.5, 0.6, 0.7)).told()
        '0.60 [0.35, 0.85]'
        """
        form = f"{'+' if signed else ''}.{digits}f"
        ends = "" if self.interval is None else " [{:{f}}, {:{f}}]".format(*self.interval, f=form)
        return f"{self.mean:{form}}{ends}"

    def all(self, digits: int = 2) -> str:
        """Every seed's.

        >>> Spread((0.5, 0.625)).all()
        '0.50 0.62'
        """
        return " ".join(f"{value:.{digits}f}" for value in self.values)


def spread_of(values: Sequence[float]) -> Spread | None:
    """None of no seeds."""
    return Spread(tuple(values)) if values else None
