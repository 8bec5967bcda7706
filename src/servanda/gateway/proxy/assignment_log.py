# The assignments of a promotion's step: a line of the log for the first request of each user.
#
# The users that were seen are kept in memory, so a gateway that starts anew writes them once more:
# the first line of a user counts, and a repeated one adds no evidence.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servanda.gateway.proxy.request import RoutedRequest
from servanda.gateway.proxy.request_log import RequestLog
from servanda.gateway.routing.hash_split import pseudonym
from servanda.gateway.routing.model import Pool, Snapshot
from servanda.traces.assignments import FAILOVER

_USERS = 200_000  # of a step that are remembered, and have a line


class AssignmentLog:
    """Writes who was served by which pool.

    Args:
        log: None: nothing is written.
        now: unix seconds.
    """

    def __init__(self, log: RequestLog | None, *, now: Callable[[], float]) -> None:
        self._log, self._now = log, now
        self._leg: tuple[str, str] = ("", "")
        self._seen: set[str] = set()

    def assign(
        self, routed: RoutedRequest, snapshot: Snapshot | None, pool: Pool, because: str
    ) -> dict[str, Any] | None:
        """Write the pool of a request when it is dispatched; returns its line, if it has one.

        Args:
            because: why `pool` is not the decided one; "" if it is.
        """
        if self._log is None or snapshot is None or not snapshot.leg:
            return None
        leg = (snapshot.run, snapshot.leg)
        if leg != self._leg:
            self._leg, self._seen = leg, set()
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
        self._log.assign(line)
        return line

    def failed_over(self, line: dict[str, Any] | None) -> None:
        """Correct a line: infer gave no reply, and stable is asked."""
        if self._log is not None and line is not None:
            self._log.assign({**line, "pool": "stable", "because": FAILOVER})
