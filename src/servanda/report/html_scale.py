# A logarithmic axis in percent of its width, so that a drawing fits any screen unscaled.

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

_APART = 17.0  # percent of the width that a label needs
_FAR = 1e30  # beyond it a number is drawn as what is infinite, or zero, is
_DECADES = 6  # what lies further below the largest value is drawn at the left edge


class Tick(NamedTuple):
    at: float
    label: str


class Scale(NamedTuple):
    """An axis from `low` to `high`, both positive; values outside stand at its ends."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Scale:
        """The axis that shows some values; those that are not positive stand at the left."""
        positive = [v for v in values if v is not None and 1 / _FAR < v < _FAR]
        high = max(positive, default=1.0)
        low = max(min(positive, default=0.1), high / 10**_DECADES)
        return cls(_step_below(low / 1.1), _step_above(high * 1.1))

    def at(self, value: float) -> float:
        """Percent of the width; 0 where the value is not above `low`."""
        if math.isnan(value) or value <= self.low:
            return 0.0
        share = math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
        return round(100 * share, 3)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """At every power of ten, and at 3 of its decade, as far as their labels have room."""
        powers = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        steps = [m * 10.0**p for m in (1, 3) for p in powers]
        chosen: list[float] = []
        for step in steps:
            free = all(abs(self.at(step) - self.at(other)) >= _APART for other in chosen)
            if free and self.low * 0.999 <= step <= self.high * 1.001:
                chosen.append(step)
        return tuple(Tick(self.at(s), f"{s:.3g}") for s in sorted(chosen))


def _step_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return power * (3 if value >= 3 * power else 1)


def _step_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return power * (3 if value <= 3 * power else 10)
