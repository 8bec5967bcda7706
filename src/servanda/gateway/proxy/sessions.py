# Sessions: the pool of each explicit session, so that it does not change within the session.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from servanda.gateway.routing.model import Pool


class Sessions:
    """The recent sessions; the least recently used is dropped first.

    Args:
        most: capacity; idle_s: time after which a session ends.
        clock: monotonic seconds.
    """

    def __init__(self, most: int, idle_s: float, clock: Callable[[], float]) -> None:
        self._most, self._idle_s, self._clock = most, idle_s, clock
        self._known: OrderedDict[str, tuple[Pool, float]] = OrderedDict()

    def pool(self, session: str) -> Pool | None:
        entry = self._known.get(session)
        if entry is None:
            return None
        if self._clock() >= entry[1]:
            del self._known[session]
            return None
        return entry[0]

    def put(self, session: str, pool: Pool) -> None:
        self._known[session] = (pool, self._clock() + self._idle_s)
        self._known.move_to_end(session)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
