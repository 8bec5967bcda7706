# Circuit breakers: a pool that fails again and again is left alone for a while.

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]
_LONGEST_S = 60.0


class Breaker:
    """Closed while all is well; open after failures in a row; then half-open, for one trial.

    Args:
        clock: seconds, steady.
        failures: in a row, after which it opens; rest_s: how long, doubled each time that a
            trial fails.
        trials: that may be under way at a time while it is half-open; None: any number, for
            what only some requests can tell.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        failures: int = 5,
        rest_s: float = 5.0,
        trials: int | None = 1,
    ) -> None:
        self._clock, self._failures, self._rest_s, self._trials = clock, failures, rest_s, trials
        self._failed = self._trying = 0
        self._next_s = rest_s
        self._until: float | None = None
        self._tried = 0.0

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    @property
    def wait_s(self) -> int:
        """Whole seconds until something may be tried."""
        return 1 if self._until is None else max(1, round(self._until - self._clock()))

    def enter(self) -> bool:
        """Whether a request may pass; whoever does says later how it went, or that it left."""
        if self._until is None:
            return True
        if self._clock() < self._until:
            return False
        # a trial that takes longer than the rest did keeps nobody else from trying
        busy = self._trials is not None and self._trying >= self._trials
        if busy and self._clock() < self._tried + self._next_s:
            return False
        self._tried = self._clock()
        self._trying += 1
        return True

    def well(self) -> None:
        self._failed = self._trying = 0
        self._until, self._next_s = None, self._rest_s

    def failed(self) -> None:
        self._failed += 1
        if self.state == "half-open":
            self._next_s = min(2 * self._next_s, _LONGEST_S)
            self._open()
        elif self._until is None and self._failed >= self._failures:
            self._open()

    def left(self) -> None:
        """A request ended without saying anything of the pool."""
        self._trying = max(0, self._trying - 1)

    def _open(self) -> None:
        self._until, self._trying = self._clock() + self._next_s, 0
