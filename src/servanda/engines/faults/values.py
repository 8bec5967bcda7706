# The values that a fault may take, each a set that can name itself.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


class Takes(Protocol):
    def __contains__(self, value: Any, /) -> bool: ...

    def __str__(self) -> str:
        """Completes the sentence "the fault takes ..."."""
        ...


@dataclass(frozen=True)
class Between:
    """Numbers in (low, high]; `whole` ones in [low, high]."""

    low: float
    high: float
    whole: bool = False

    def __contains__(self, value: Any, /) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        if self.whole:
            return self.low <= value <= self.high
        return math.isfinite(value) and self.low < value <= self.high

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number in [{self.low:.12g}, {self.high:.12g}]"
        return f"a number in ({self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Switch:
    """On, and nothing else: a kernel without a fault has no `fault:`."""

    def __contains__(self, value: Any, /) -> bool:
        return value is True

    def __str__(self) -> str:
        return "true"


SWITCH = Switch()


@dataclass(frozen=True)
class OneOf:
    words: tuple[str, ...]

    def __contains__(self, value: Any, /) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return " or ".join(self.words)
