# The router: a snapshot prepared for fast decisions on the hot path.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

from servanda.gateway.routing.model import Decision, Pool, RequestFacts, SliceRoute, Snapshot
from servanda.judgement.slices.rules import LABEL, Term

_TOKENS = "request.prompt_tokens"
_OUTSIDE: Mapping[str, Pool | None] = {"stable": "stable", "infer": "infer", "refuse": None}
_BASE = "split"  # reason of a route that the share of the whole traffic decides
_REMEMBERED = 4096  # combinations of labels in the cache


@dataclass(frozen=True)
class _Route:
    """The combined route of slices."""

    share: float
    mirror: float
    reason: str
    critical: bool


@dataclass(frozen=True)
class _SliceSet:
    """The slices of a request, and the decisions that depend only on them.

    Args:
        names: of the slices; acting: whether any of them diverts requests.
        done, would: the route by slices that act, and the route if all did.
        away: the mirrored ones; largest, largest_away: inclusion probability.
    """

    slices: tuple[SliceRoute, ...]
    names: tuple[str, ...]
    acting: bool
    done: _Route
    would: _Route
    away: tuple[SliceRoute, ...]
    largest: float
    largest_away: float


class Router:
    """Decides requests under one snapshot.

    Args:
        snapshot: None: none received yet.
        without: the pool without a snapshot.
    """

    def __init__(self, snapshot: Snapshot | None, without: Pool = "stable") -> None:
        self.snapshot = snapshot
        self._without: Pool = without
        # few combinations occur repeatedly
        self._matching = lru_cache(_REMEMBERED)(self._match)
        self._together = lru_cache(_REMEMBERED)(self._put_together)

    def decide(self, facts: RequestFacts, *, now: float) -> Decision:
        """The route of a request.

        Among the slices of a request a pin has priority over decisions, stable over infer, and the
        smallest share over larger ones.

        Args:
            now: unix seconds.
        """
        snapshot = self.snapshot
        if snapshot is None:
            return Decision(self._without, self._without, False, False, 0.0, (), "no snapshot", 0)
        matched = self._together(self._names(facts))
        names = matched.names
        if not self._inside(facts):
            other = _OUTSIDE[snapshot.outside]
            return Decision(other, other, False, False, 0.0, names, "outside", snapshot.version)
        if now >= snapshot.valid_until and matched.acting:
            pool = snapshot.without
            return Decision(pool, pool, False, False, 0.0, names, "expired", snapshot.version)
        at = place(self._salt, "share", facts.sticky)
        done = matched.done
        pool = self._pool(done, at)
        reason = done.reason if pool != "infer" or done.reason.endswith("pinned") else "share"
        if facts.session not in (None, pool) and not done.critical:
            pool, reason = facts.session or pool, "session"
        mirrored = (
            pool == "stable"
            and done.mirror > 0
            and place(self._salt, "mirror", facts.request) < done.mirror
        )
        instead = self._pool(matched.would, at)
        of, chance = matched.slices, matched.largest
        if matched.away and "stable" in (pool, instead):
            of, chance = matched.away, matched.largest_away
        chance = max(chance, snapshot.sample)
        if pool != "infer" and not mirrored:
            chance = 0.0
        # one random number for all: the samples are nested
        draw = place(self._salt, "sample", facts.request) if chance else 1.0
        sampled = draw < chance
        drawn = {route.name: route.sample for route in of if draw < route.sample} if sampled else {}
        return Decision(
            pool=pool,
            would=instead,
            mirrored=mirrored,
            sampled=sampled,
            chance=chance,
            slices=names,
            reason=reason,
            version=snapshot.version,
            drawn=drawn,
            # a session of an earlier step was decided by another share, whichever pool it is on
            apart="session" if facts.session else "" if done.reason == _BASE else done.reason,
        )

    def _pool(self, chosen: _Route, at: float) -> Pool:
        assert self.snapshot is not None
        return "infer" if at < chosen.share or not self.snapshot.has_stable else "stable"

    def _chosen(self, slices: tuple[SliceRoute, ...]) -> _Route:
        """The combined shares of slices."""
        assert self.snapshot is not None
        critical = any(route.critical for route in slices)
        mirror = max((route.mirror for route in slices), default=0.0) or self.snapshot.mirror
        for to, share in (("stable", 0.0), ("infer", 1.0)):
            for route in slices:
                if route.pinned == to:
                    return _Route(share, mirror, f"{route.name} pinned", True)
        base = self.snapshot.base
        # infer may serve no request: a promotion was rolled back, also for open sessions
        chosen = _Route(base, mirror, _BASE, critical or base <= 0)
        for route in slices:
            if route.share < chosen.share:
                chosen = _Route(route.share, mirror, f"{route.name} {route.status}", critical)
        return chosen

    def _names(self, facts: RequestFacts) -> tuple[str, ...]:
        """The slices of a request."""
        by_label = self._matching(tuple(map(facts.labels.get, self._labels)))
        if not self._by_tokens:
            return by_label
        return tuple(
            name
            for name in by_label
            if all(
                term.met_by(facts.prompt_tokens)
                for term in self._by_name[name].cut.terms
                if term.field == _TOKENS
            )
        )

    def _match(self, labels: tuple[str | None, ...]) -> tuple[str, ...]:
        given: Mapping[str, Any] = dict(zip(self._labels, labels, strict=True))

        def matches(term: Term) -> bool:
            return term.field == _TOKENS or term.met_by(given[term.field.removeprefix(LABEL)])

        return tuple(route.name for route in self._all if all(map(matches, route.cut.terms)))

    def _put_together(self, names: tuple[str, ...]) -> _SliceSet:
        slices = tuple(self._by_name[name] for name in names)
        acting = tuple(route for route in slices if route.acts or route.pinned)
        away = tuple(route for route in slices if route.mirror > 0)
        return _SliceSet(
            slices=slices,
            names=names,
            acting=bool(acting),
            done=self._chosen(acting),
            would=self._chosen(slices),
            away=away,
            largest=max((route.sample for route in slices), default=0.0),
            largest_away=max((route.sample for route in away), default=0.0),
        )

    def _inside(self, facts: RequestFacts) -> bool:
        """Whether a request lies in the contract's envelope, as far as known."""
        assert self.snapshot is not None
        span = self.snapshot.prompt_tokens
        if span is None or facts.prompt_tokens is None:
            return True
        return span[0] <= facts.prompt_tokens <= span[1]

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """The labels that slices use."""
        fields = sorted({f for route in self._all for f in route.cut.fields if f.startswith(LABEL)})
        return tuple(field.removeprefix(LABEL) for field in fields)

    @cached_property
    def _by_tokens(self) -> bool:
        return any(_TOKENS in route.cut.fields for route in self._all)

    @property
    def counts_tokens(self) -> bool:
        """Whether decisions need the length of a prompt."""
        bounded = self.snapshot is not None and self.snapshot.prompt_tokens is not None
        return bounded or self._by_tokens

    @cached_property
    def _all(self) -> tuple[SliceRoute, ...]:
        return self.snapshot.slices if self.snapshot is not None else ()

    @cached_property
    def _by_name(self) -> Mapping[str, SliceRoute]:
        return {route.name: route for route in self._all}

    @cached_property
    def _salt(self) -> bytes:
        return bytes.fromhex(self.snapshot.salt) if self.snapshot is not None else b""


# The split: a keyed hash that maps a request, or its user, to a place in [0, 1).
#
# It is deterministic, so that all replicas split equally and a session keeps its place, and keyed,
# so that clients cannot choose the pool of their requests.


def place(key: bytes, *parts: str) -> float:
    """A place, uniform in [0, 1), the same for the same key and parts.

    A place below a share is below every larger one, so a larger share moves no one back.

    Args:
        key: at most 64 bytes.
        parts: the object and the purpose; each purpose has independent places.

    >>> place(b"key", "share", "session 7") == place(b"key", "share", "session 7")
    True
    """
    digest = blake2b("\0".join(parts).encode(), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def pseudonym(key: bytes, of: str) -> str:
    """A keyed hash of a user, 8 bytes in hex: deterministic, and not invertible."""
    return blake2b(of.encode(), key=key, digest_size=8).hexdigest()


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
