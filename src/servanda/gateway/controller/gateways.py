# Gateways: who follows, and what their counts say of the traffic.
#
# A gateway counts since its start, so what happened lately is a difference of two reports.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from servanda.contract.model import WHOLE
from servanda.gateway.controller.status import GatewayStanding, PoolStanding
from servanda.gateway.routing.state import Facts

LATELY_S = 60.0  # what "lately" means of traffic
ALIVE_S = 10.0  # after which a gateway that says nothing answers nobody
_KEPT_S = 86_400.0
_MOST = 64  # gateways that are remembered
_EVERY_S = 1.0  # between two reports that are remembered
_LARGEST = 2**53  # of a count
_POOLS = ("infer", "stable")


@dataclass(frozen=True)
class _Report:
    """Of one moment: cumulative counts by slice, and the most in flight since the one before."""

    at: float
    launched: Mapping[str, float]
    decided: Mapping[str, float]
    peak: Mapping[str, float]
    flying: Mapping[str, float]


@dataclass
class _Gateway:
    start: float
    heard: float = -math.inf
    version: int = 0
    skew_s: float = 0.0
    counts: Mapping[str, Any] = field(default_factory=dict)
    reports: deque[_Report] = field(default_factory=deque)


class Gateways:
    """What was heard of each gateway; not for several threads at once."""

    def __init__(self) -> None:
        self._known: dict[str, _Gateway] = {}

    def heard(
        self,
        name: str,
        start: float,
        version: int,
        counts: Mapping[str, Any],
        *,
        latest: float | None,
        now: float,
    ) -> None:
        """Take a message.

        Args:
            latest: when its last row was launched, by its own clock; None: it has none.
        """
        one = self._known.get(name)
        # one that begins again while its clock went back is the same gateway all the same
        silent = one is not None and start != one.start and now - one.heard > ALIVE_S
        if one is None or start > one.start or silent:
            one = self._known[name] = _Gateway(start)
            for old in sorted(self._known, key=lambda n: self._known[n].heard)[:-_MOST]:
                if old != name:
                    del self._known[old]
        elif start < one.start:
            return  # a message of a process that has ended
        one.heard, one.version, one.counts = now, version, counts
        if latest is not None:
            one.skew_s = max(0.0, latest - now)
        report = _report(counts, now)
        if one.reports and one.reports[-1].at > now:  # a clock that went back
            one.reports = deque(replace(r, at=min(r.at, now)) for r in one.reports)
        # the oldest is what growth is counted from, so only what came after it is merged
        if len(one.reports) > 1 and now - one.reports[-2].at < _EVERY_S:
            last = one.reports.pop()
            peak, flying = _most((last.peak, report.peak)), _most((last.flying, report.flying))
            report = replace(report, peak=peak, flying=flying)
        one.reports.append(report)
        while len(one.reports) > 2 and one.reports[1].at < now - LATELY_S:
            one.reports.popleft()

    @property
    def any(self) -> bool:
        """Whether one was heard at all."""
        return bool(self._known)

    def facts(self, now: float, floors: Mapping[tuple[str, str], float]) -> Facts:
        alive = self._alive(now)
        lately = [r for one in alive for r in (_most(x.flying for x in _lately(one, now)),)]
        return Facts(
            now=now,
            shares=self.shares(now),
            in_flight=_sum(lately),
            stable_in_flight=self._peak("stable", now) if alive else None,
            floors=floors,
        )

    def shares(self, now: float) -> dict[str, float]:
        """slice -> of all requests lately, how many lay in it.

        By what infer was sent and by what was decided, the larger one: of a slice that stable
        serves infer is sent little, and a request is decided for its most specific slice.
        """
        launched, decided = self._grown("launched", now), self._grown("decided", now)
        total = math.fsum(decided.values())
        sent = launched.get(WHOLE, 0.0)
        found = {name: n / sent for name, n in launched.items()} if sent > 0 else {}
        for name, n in decided.items():
            if total > 0:
                found[name] = max(found.get(name, 0.0), n / total)
        if found:
            found[WHOLE] = 1.0
        return {name: min(1.0, share) for name, share in found.items()}

    def rates(self, now: float) -> dict[str, float]:
        """slice -> requests a second that infer is sent, lately."""
        found: list[dict[str, float]] = []
        for one in self._alive(now):
            took = now - one.reports[0].at
            if took > 0:
                grown = _grown(one, "launched")
                found.append({name: n / took for name, n in grown.items()})
        return _sum(found)

    def pools(self, now: float, most: int | None) -> dict[str, PoolStanding]:
        """Of each pool; `most`: that stable can answer at a time."""
        alive = self._alive(now)
        return {
            pool: PoolStanding(
                in_flight=int(sum(_numbers(g.counts, "in_flight").get(pool, 0) for g in alive)),
                peak=int(self._peak(pool, now)),
                most=most if pool == "stable" else None,
                open_at=sum(_texts(g.counts, "pools").get(pool) == "open" for g in alive),
            )
            for pool in _POOLS
        }

    def served(self, key: str) -> dict[str, dict[str, int]]:
        """slice -> pool -> requests since gateways started; key: "answers" or "would".

        A gateway counts a request for its most specific slice, and all lie in the whole traffic.
        """
        found: dict[str, dict[str, int]] = {}
        for one in self._known.values():
            for name, n in _numbers(one.counts, key).items():
                slice_, _, rest = name.partition("\t")
                pool = rest.partition("\t")[0]
                for place in {slice_, WHOLE}:
                    by_pool = found.setdefault(place, {})
                    by_pool[pool] = by_pool.get(pool, 0) + int(n)
        return found

    def standing(
        self, taken: Mapping[tuple[str, float], int], behind: Mapping[tuple[str, float], int]
    ) -> tuple[GatewayStanding, ...]:
        return tuple(
            GatewayStanding(
                name=name,
                start=one.start,
                heard=one.heard,
                version=one.version,
                taken=taken.get((name, one.start), 0),
                behind=behind.get((name, one.start), 0),
                skew_s=one.skew_s,
                counts=one.counts,
            )
            for name, one in sorted(self._known.items())
        )

    def _alive(self, now: float) -> list[_Gateway]:
        for one in self._known.values():
            one.heard = min(one.heard, now)  # a clock that went back
        for name in [n for n, one in self._known.items() if now - one.heard > _KEPT_S]:
            del self._known[name]
        return [one for one in self._known.values() if now - one.heard <= ALIVE_S]

    def _peak(self, pool: str, now: float) -> float:
        """The most at a time lately, all gateways at their most together."""
        return math.fsum(
            _most(r.peak for r in _lately(one, now)).get(pool, 0.0) for one in self._alive(now)
        )

    def _grown(self, what: str, now: float) -> dict[str, float]:
        return _sum([_grown(one, what) for one in self._alive(now)])


def _lately(one: _Gateway, now: float) -> list[_Report]:
    return [r for r in one.reports if r.at >= now - LATELY_S] or [*one.reports][-1:]


def _grown(one: _Gateway, what: str) -> dict[str, float]:
    """What was counted since the oldest report that is remembered."""
    if not one.reports:
        return {}
    first, last = getattr(one.reports[0], what), getattr(one.reports[-1], what)
    return {name: max(0.0, n - first.get(name, 0.0)) for name, n in last.items()}


def _report(counts: Mapping[str, Any], now: float) -> _Report:
    decided: dict[str, float] = {}
    for name, n in _numbers(counts, "decisions").items():
        slice_ = name.partition("\t")[0]
        decided[slice_] = decided.get(slice_, 0.0) + n
    return _Report(
        now,
        _numbers(counts, "launched"),
        decided,
        _numbers(counts, "peak"),
        _numbers(counts, "slice_in_flight"),
    )


def _numbers(counts: Mapping[str, Any], key: str) -> dict[str, float]:
    """The numbers of one count; what is none is left out."""
    found = counts.get(key)
    if not isinstance(found, Mapping):
        return {}
    return {
        name: float(n)
        for name, n in found.items()
        if isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < _LARGEST
    }


def _texts(counts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = counts.get(key)
    return found if isinstance(found, Mapping) else {}


def _most(of: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in of:
        for name, n in one.items():
            found[name] = max(found.get(name, 0.0), n)
    return found


def _sum(of: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in of:
        for name, n in one.items():
            found[name] = found.get(name, 0.0) + n
    return found
