# The router: a snapshot, made ready to decide one request after another, on the hot path.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from servanda.gateway.routing.hash_split import place
from servanda.gateway.routing.model import Decision, Known, Pool, SliceRoute, Snapshot
from servanda.judgement.slices.rules import LABEL, Term

_TOKENS = "request.prompt_tokens"
_OUTSIDE: Mapping[str, Pool | None] = {"stable": "stable", "infer": "infer", "refuse": None}
_REMEMBERED = 4096  # combinations of labels whose slices are kept


@dataclass(frozen=True)
class _Chosen:
    """What slices say together of a route."""

    share: float
    mirror: float
    reason: str
    critical: bool


@dataclass(frozen=True)
class _Together:
    """The slices that a request lies in, and what follows from them alone.

    Args:
        names: of the slices; acting: whether any of them moves requests.
        done, would: by those that act, and if all did.
        away: those that are mirrored; largest, largest_away: chance of being sampled.
    """

    slices: tuple[SliceRoute, ...]
    names: tuple[str, ...]
    acting: bool
    done: _Chosen
    would: _Chosen
    away: tuple[SliceRoute, ...]
    largest: float
    largest_away: float


class Router:
    """Decides by one snapshot.

    Args:
        snapshot: None: none was ever received.
        without: who serves then.
    """

    def __init__(self, snapshot: Snapshot | None, without: Pool = "stable") -> None:
        self.snapshot = snapshot
        self._without: Pool = without
        # the same few combinations come again and again
        self._matching = lru_cache(_REMEMBERED)(self._match)
        self._together = lru_cache(_REMEMBERED)(self._put_together)

    def decide(self, known: Known, *, now: float) -> Decision:
        """Where a request goes.

        Among the slices of a request a person's word comes before any decision, stable before
        infer, and the smallest share before a larger one.

        Args:
            now: unix seconds.
        """
        snapshot = self.snapshot
        if snapshot is None:
            return Decision(self._without, self._without, False, False, 0.0, (), "no snapshot", 0)
        lies = self._together(self._names(known))
        names = lies.names
        if not self._inside(known):
            other = _OUTSIDE[snapshot.outside]
            return Decision(other, other, False, False, 0.0, names, "outside", snapshot.version)
        if now >= snapshot.valid_until and lies.acting:
            pool = snapshot.without
            return Decision(pool, pool, False, False, 0.0, names, "expired", snapshot.version)
        at = place(self._salt, "share", known.sticky)
        done = lies.done
        pool = self._pool(done, at)
        reason = done.reason if pool != "infer" or done.reason.endswith("pinned") else "share"
        if known.session not in (None, pool) and not done.critical:
            pool, reason = known.session or pool, "session"
        mirrored = (
            pool == "stable"
            and done.mirror > 0
            and place(self._salt, "mirror", known.request) < done.mirror
        )
        instead = self._pool(lies.would, at)
        of, chance = lies.slices, lies.largest
        if lies.away and "stable" in (pool, instead):
            of, chance = lies.away, lies.largest_away
        chance = max(chance, snapshot.sample)
        if pool != "infer" and not mirrored:
            chance = 0.0
        # one draw for all: the samples are nested
        draw = place(self._salt, "sample", known.request) if chance else 1.0
        sampled = draw < chance
        return Decision(
            pool=pool,
            would=instead,
            mirrored=mirrored,
            sampled=sampled,
            chance=chance,
            slices=names,
            reason=reason,
            version=snapshot.version,
            drawn={one.name: one.sample for one in of if draw < one.sample} if sampled else {},
        )

    def _pool(self, chosen: _Chosen, at: float) -> Pool:
        assert self.snapshot is not None
        return "infer" if at < chosen.share or not self.snapshot.has_stable else "stable"

    def _chosen(self, slices: tuple[SliceRoute, ...]) -> _Chosen:
        """The shares of slices that are followed, taken together."""
        assert self.snapshot is not None
        critical = any(one.critical for one in slices)
        mirror = max((one.mirror for one in slices), default=0.0) or self.snapshot.mirror
        for to, share in (("stable", 0.0), ("infer", 1.0)):
            for one in slices:
                if one.pinned == to:
                    return _Chosen(share, mirror, f"{one.name} pinned", True)
        base = self.snapshot.base
        # infer may serve nobody at all: a promotion was rolled back, and no session waits for that
        chosen = _Chosen(base, mirror, "split", critical or base <= 0)
        for one in slices:
            if one.share < chosen.share:
                chosen = _Chosen(one.share, mirror, f"{one.name} {one.status}", critical)
        return chosen

    def _names(self, known: Known) -> tuple[str, ...]:
        """The slices that a request lies in."""
        by_label = self._matching(tuple(map(known.labels.get, self._labels)))
        if not self._by_tokens:
            return by_label
        return tuple(
            name
            for name in by_label
            if all(
                term.met_by(known.prompt_tokens)
                for term in self._by_name[name].cut.terms
                if term.field == _TOKENS
            )
        )

    def _match(self, labels: tuple[str | None, ...]) -> tuple[str, ...]:
        given: Mapping[str, Any] = dict(zip(self._labels, labels, strict=True))

        def met(term: Term) -> bool:
            return term.field == _TOKENS or term.met_by(given[term.field.removeprefix(LABEL)])

        return tuple(one.name for one in self._all if all(map(met, one.cut.terms)))

    def _put_together(self, names: tuple[str, ...]) -> _Together:
        slices = tuple(self._by_name[name] for name in names)
        acting = tuple(one for one in slices if one.acts or one.pinned)
        away = tuple(one for one in slices if one.mirror > 0)
        return _Together(
            slices=slices,
            names=names,
            acting=bool(acting),
            done=self._chosen(acting),
            would=self._chosen(slices),
            away=away,
            largest=max((one.sample for one in slices), default=0.0),
            largest_away=max((one.sample for one in away), default=0.0),
        )

    def _inside(self, known: Known) -> bool:
        """Whether a request lies in the contract's envelope, as far as anybody knows."""
        assert self.snapshot is not None
        span = self.snapshot.prompt_tokens
        if span is None or known.prompt_tokens is None:
            return True
        return span[0] <= known.prompt_tokens <= span[1]

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """Labels that any slice looks at."""
        fields = sorted({f for one in self._all for f in one.cut.fields if f.startswith(LABEL)})
        return tuple(field.removeprefix(LABEL) for field in fields)

    @cached_property
    def _by_tokens(self) -> bool:
        return any(_TOKENS in one.cut.fields for one in self._all)

    @property
    def counts_tokens(self) -> bool:
        """Whether a decision needs to know how many tokens a prompt has."""
        bounded = self.snapshot is not None and self.snapshot.prompt_tokens is not None
        return bounded or self._by_tokens

    @cached_property
    def _all(self) -> tuple[SliceRoute, ...]:
        return self.snapshot.slices if self.snapshot is not None else ()

    @cached_property
    def _by_name(self) -> Mapping[str, SliceRoute]:
        return {one.name: one for one in self._all}

    @cached_property
    def _salt(self) -> bytes:
        return bytes.fromhex(self.snapshot.salt) if self.snapshot is not None else b""
