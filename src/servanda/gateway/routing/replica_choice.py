# Which replica of a pool a request is sent to.
#
# Replicas take turns by weight, and the requests of a session stay on one of them, whose prefix
# cache has the session.  Neither depends on responses or on load: a replica that fails fast would
# otherwise attract requests, and the choice would depend on the responses that are evidence.

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

_ROUNDING = 1e-9


class WeightedTurns:
    """Weighted round-robin: each replica gets its share within less than one request.

    While the weights stay the same, after any number of requests each replica has had its share of
    them, to within 1 - 1 / (2 n - 2) requests for n replicas; so over any window, to within less
    than 2.  Smooth weighted round-robin has no such bound: its deviation exceeds 1.

    Source:
        R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980.

    >>> turns = WeightedTurns()
    >>> [turns.take({"a": 3.0, "b": 1.0}) for _ in range(8)]
    ['a', 'a', 'b', 'a', 'a', 'a', 'b', 'a']
    """

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._due: dict[str, float] = {}  # requests that a replica is short of its share

    def take(self, weights: Mapping[str, float]) -> str:
        """The replica whose turn it is.

        Args:
            weights: replica -> weight > 0, of those that may be chosen; not empty.
        """
        if weights != self._weights:
            self._weights = dict(weights)
            kept = [self._due.get(name, 0.0) for name in weights]
            excess = math.fsum(kept) / len(kept)  # what is due to all of them adds up to 0
            self._due = {n: due - excess for n, due in zip(weights, kept, strict=True)}
        total = math.fsum(weights.values())
        due = {name: self._due[name] + weight / total for name, weight in weights.items()}
        spare = 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0.0

        def turns_left(name: str) -> tuple[float, float]:
            """Turns after which the replica would be short of its share by the bound."""
            left = (1 - spare - due[name]) * total / weights[name]
            return math.ceil(left - _ROUNDING), -due[name]

        candidates = [name for name in due if due[name] >= spare - _ROUNDING]
        chosen = min(candidates or due, key=turns_left)
        due[chosen] -= 1
        self._due = due
        return chosen


def by_session(session: str, weights: Mapping[str, float]) -> list[str]:
    """The replicas in the order in which a session prefers them: weighted rendezvous hashing.

    Each replica is the first of its share of all sessions.  A replica that joins or leaves moves
    only the sessions that it gets or had.  All gateways have the same order.

    Source:
        J. Schindelhauer and G. Schomaker, Weighted distributed hash tables, SPAA 2005.

    >>> by_session("s", {"a": 1.0, "b": 1.0}) == by_session("s", {"b": 1.0, "a": 1.0})
    True
    """

    def distance(name: str) -> float:
        digest = blake2b(f"{len(name)} {name} {session}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
        return -math.log(uniform) / weights[name]

    return sorted(weights, key=lambda name: (distance(name), name))
