# Settled: who has to answer a slice of the traffic, and from when to when.

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gateway.traffic import Spell

WHOLE = "all"
_BY_DOMAIN = "domain={}"


@dataclass
class _Word:
    slice: str
    pool: str
    since: float
    until: float = math.inf

    def holds(self, one: Spell) -> bool:
        """Whether it held for as long as a request was under way."""
        here = self.slice in (WHOLE, _BY_DOMAIN.format(one.domain))
        return here and self.since <= one.began and one.ended <= self.until


@dataclass
class Settled:
    """What was said of slices, and every gateway follows: by a pin, or a promotion's route."""

    _words: list[_Word] = field(default_factory=list)

    def say(self, name: str, pool: str) -> None:
        """From now on this pool answers the slice."""
        self._words.append(_Word(name, pool, time.monotonic()))

    def end(self, name: str) -> None:
        """From now on nothing is said of it; before anybody is told so."""
        for word in self._words:
            if word.slice == name:
                word.until = min(word.until, time.monotonic())

    def astray(self, one: Spell) -> bool:
        """Whether a request was answered by another pool than was settled all the time."""
        words = [word for word in self._words if one.pool and word.holds(one)]
        return any(word.pool != one.pool for word in words)
