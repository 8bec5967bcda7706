# Time that no one sets: pins, dwells and routes last as long as they were meant to.

from __future__ import annotations

import time
from collections.abc import Callable

# the boot clock goes on while a machine is suspended, which the monotonic one does not
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def _steady() -> float:
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


class SteadyClock:
    """Unix seconds as the system's clock had them at the start, which go on at an even pace.

    Who sets the system's clock afterwards changes nothing here.

    Args:
        wall: unix seconds by the system's clock; steady: seconds that no one can set.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady
    ) -> None:
        self._wall, self._steady = wall, steady
        self._start = wall() - steady()

    def __call__(self) -> float:
        return self._start + self._steady()

    @property
    def moved_s(self) -> float:
        """By how much the system's clock was set forward since the start."""
        return self._wall() - self()
