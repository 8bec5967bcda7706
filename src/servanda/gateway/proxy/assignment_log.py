# The assignments of a promotion's step: a line for the first request of each user, for the log and
# for the leader.
#
# The users that were seen are kept in memory, so a gateway that starts anew writes them once more:
# the first line of a user counts, and a repeated one adds no evidence.

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from servanda.gateway.proxy.request import RoutedRequest
from servanda.gateway.proxy.request_log import RequestLog
from servanda.gateway.routing.hash_split import pseudonym
from servanda.gateway.routing.model import Pool, Snapshot
from servanda.traces.assignments import FAILOVER

_USERS = 200_000  # of a step that are remembered, and have a line
_PART = 2_000  # most lines of a message to the leader
_SENT = (
    "run",
    "leg",
    "at",
    "key",
    "pool",
    "because",
    "apart",
)  # to the leader: nothing of a request


class AssignmentLog:
    """Writes who was served by which pool.

    Args:
        log: None: nothing is written.
        leads: whether a leader takes the lines.
        now: unix seconds.
    """

    def __init__(
        self, log: RequestLog | None, *, leads: bool = False, now: Callable[[], float]
    ) -> None:
        self._log, self.leads, self._now = log, leads, now
        self._leg: tuple[str, str] = ("", "")
        self._seen: set[str] = set()
        self._waiting: deque[dict[str, Any]] = deque()

    def assign(
        self, routed: RoutedRequest, snapshot: Snapshot | None, pool: Pool, because: str
    ) -> dict[str, Any] | None:
        """Write the pool of a request when it is dispatched; returns its line, if it has one.

        Args:
            because: why `pool` is not the decided one; "" if it is.
        """
        if not (self._log is not None or self.leads) or snapshot is None or not snapshot.leg:
            return None
        leg = (snapshot.run, snapshot.leg)
        if leg != self._leg:
            self._leg, self._seen = leg, set()
            self._waiting.clear()
        key = pseudonym(bytes.fromhex(snapshot.salt), f"split {routed.facts.sticky}")
        if key in self._seen or len(self._seen) >= _USERS:
            return None
        self._seen.add(key)
        facts, apart = routed.facts, routed.decision.apart
        line: dict[str, Any] = {
            "run": leg[0],
            "leg": leg[1],
            "at": self._now(),
            "key": key,
            "pool": pool,
            "labels": facts.labels,
            **({"prompt_tokens": facts.prompt_tokens} if facts.prompt_tokens is not None else {}),
            **({"because": because} if because else {}),
            **({"apart": apart} if apart else {}),
        }
        self._write(line)
        return line

    def failed_over(self, line: dict[str, Any] | None) -> None:
        """Correct a line: infer gave no reply, and stable is asked."""
        if line is not None:
            self._write({**line, "pool": "stable", "because": FAILOVER})

    def _write(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.assign(line)
        if self.leads and (line["run"], line["leg"]) == self._leg:
            self._waiting.append({name: line[name] for name in _SENT if name in line})

    def waiting(self) -> list[dict[str, Any]]:
        """The next lines for the leader, oldest first."""
        return [*islice(self._waiting, _PART)]

    def taken(self, lines: list[dict[str, Any]]) -> None:
        """Forget lines that the leader has."""
        while lines and self._waiting and self._waiting[0] is lines[0]:
            self._waiting.popleft()
            lines = lines[1:]
