# A clock that cannot be set: pins, hold times and routes keep their durations.

from __future__ import annotations

import time
from collections.abc import Callable

# the boot clock includes suspended time, unlike the monotonic one
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def _steady() -> float:
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


class SteadyClock:
    """Unix seconds from the system's clock at the start, continued by a monotonic clock.

    Later changes of the system's clock have no effect.

    Args:
        wall: unix seconds of the system's clock; steady: monotonic seconds.
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
        """Seconds by which the system's clock was set forward since the start."""
        return self._wall() - self()
