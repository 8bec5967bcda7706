# Lags: how long sampled requests waited for their evidence, counted in buckets.

from __future__ import annotations

from bisect import bisect_left
from typing import Any

# upper bounds, seconds; one more bucket holds what is above them
BOUNDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class Lags:
    """A histogram of seconds since this leader started."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """One more; a gateway whose clock is ahead makes it 0, never less."""
        seconds = max(0.0, seconds)
        self._buckets[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def told(self) -> dict[str, Any]:
        """As `ScoringStanding.lags` has it; empty where nothing was scored yet.

        >>> lags = Lags()
        >>> lags.told()
        {}
        >>> lags.add(1.0); lags.add(7e3)
        >>> told = lags.told()
        >>> told["buckets"]["1.0"], told["buckets"]["inf"], told["sum"]
        (1, 1, 7001.0)
        """
        if not any(self._buckets):
            return {}
        names = [*map(repr, BOUNDS), "inf"]
        return {"buckets": dict(zip(names, self._buckets, strict=True)), "sum": self._sum}
