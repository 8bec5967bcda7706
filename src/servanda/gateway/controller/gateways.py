# The gateways that follow a controller, and the traffic statistics from their counts.
#
# A gateway counts from its start, so recent traffic is the difference of two reports.

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from servanda.contract.model import WHOLE, base_of
from servanda.contract.policy import Replica, Routing
from servanda.gateway.controller.messages import Message
from servanda.gateway.controller.status import GatewayStatus, PoolStatus, ReplicaStatus
from servanda.gateway.proxy.counters import numbers
from servanda.gateway.routing.state import TrafficFacts
from servanda.theory.planned_share import PlannedShare
from servanda.traces.request_log import FAILOVER, Assignment

LATELY_S = 60.0  # window of recent traffic
ALIVE_S = 10.0  # after which a silent gateway is taken to serve no one
_KEPT_S = 86_400.0
_MOST = 64  # gateways kept
_EVERY_S = 1.0  # between two reports kept
_POOLS = ("infer", "stable")


@dataclass(frozen=True)
class _Report:
    """One report: cumulative counts by slice, and the peak in flight since the last report."""

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

    def largest(self, what: str, now: float) -> dict[str, float]:
        """The largest recent count."""
        lately = [r for r in self.reports if r.at >= now - LATELY_S] or [*self.reports][-1:]
        return _most(getattr(report, what) for report in lately)

    def grown(self, what: str) -> dict[str, float]:
        """What was counted since the oldest report that is remembered."""
        if not self.reports:
            return {}
        first, last = getattr(self.reports[0], what), getattr(self.reports[-1], what)
        return {name: max(0.0, n - first.get(name, 0.0)) for name, n in last.items()}


class Gateways:
    """The latest reports of each gateway; not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, _Gateway] = {}

    def record(self, message: Message, *, now: float) -> None:
        name, start = message.gateway, message.start
        gateway = self._known.get(name)
        # a gateway that restarts with an earlier clock is still the same gateway
        silent = gateway is not None and start != gateway.start and now - gateway.heard > ALIVE_S
        if gateway is None or start > gateway.start or silent:
            gateway = self._known[name] = _Gateway(start)
            for old in sorted(self._known, key=lambda n: self._known[n].heard)[:-_MOST]:
                if old != name:
                    del self._known[old]
        elif start < gateway.start:
            return  # a late message of an ended process
        gateway.heard, gateway.version, gateway.counts = now, message.version, message.counts
        if message.latest is not None:
            gateway.skew_s = max(0.0, message.latest - now)
        report = _report(message.counts, now)
        if gateway.reports and gateway.reports[-1].at > now:  # the clock was set back
            gateway.reports = deque(replace(r, at=min(r.at, now)) for r in gateway.reports)
        # growth is counted from the oldest report, so only later ones are merged
        if len(gateway.reports) > 1 and now - gateway.reports[-2].at < _EVERY_S:
            last = gateway.reports.pop()
            peak, flying = _most((last.peak, report.peak)), _most((last.flying, report.flying))
            report = replace(report, peak=peak, flying=flying)
        gateway.reports.append(report)
        while len(gateway.reports) > 2 and gateway.reports[1].at < now - LATELY_S:
            gateway.reports.popleft()

    @property
    def any(self) -> bool:
        """Whether any gateway has reported."""
        return bool(self._known)

    def facts(self, now: float, floors: Mapping[tuple[str, str], float]) -> TrafficFacts:
        alive = self._alive(now)
        return TrafficFacts(
            now=now,
            shares=self.shares(now),
            in_flight=_sum(gateway.largest("flying", now) for gateway in alive),
            stable_in_flight=self._peak("stable", now) if alive else None,
            floors=floors,
        )

    def shares(self, now: float) -> dict[str, float]:
        """slice -> its share of all recent requests.

        The larger of two counts, requests sent to the infer kernel and decisions: a slice that
        stable serves sends few requests to infer, and a decision counts only for the most
        specific slice.
        """
        alive = self._alive(now)
        launched, decided = (
            _sum(gateway.grown(what) for gateway in alive) for what in ("launched", "decided")
        )
        total = math.fsum(decided.values())
        sent = launched.get(WHOLE, 0.0)
        shares = {name: n / sent for name, n in launched.items()} if sent > 0 else {}
        for name, n in decided.items():
            if total > 0:
                shares[name] = max(shares.get(name, 0.0), n / total)
        if shares:
            shares[WHOLE] = 1.0
        return {name: min(1.0, share) for name, share in shares.items()}

    def rates(self, now: float) -> dict[str, float]:
        """slice -> recent requests per second that are sent to the infer kernel."""
        rates: list[dict[str, float]] = []
        for gateway in self._alive(now):
            took = now - gateway.reports[0].at
            if took > 0:
                rates.append({name: n / took for name, n in gateway.grown("launched").items()})
        return _sum(rates)

    def pools(self, now: float, policy: Routing) -> dict[str, PoolStatus]:
        """The status of each pool, with its replicas and the capacity of stable by the contract."""
        alive, most = self._alive(now), policy.stable_in_flight
        replicas = policy.replicas
        declared = {"infer": replicas.infer or (), "stable": replicas.stable or ()}
        return {
            pool: PoolStatus(
                in_flight=int(sum(_numbers(g.counts, "in_flight").get(pool, 0) for g in alive)),
                peak=int(self._peak(pool, now)),
                most=most if pool == "stable" else None,
                open_at=sum(_mapping(g.counts, "pools").get(pool) == "open" for g in alive),
                replicas=tuple(
                    _replica(replica, [_mapping(g.counts, "servers").get(pool) for g in alive])
                    for replica in declared[pool]
                ),
            )
            for pool in _POOLS
        }

    def served(self) -> dict[str, dict[str, int]]:
        """slice -> pool -> requests that it answered since gateways started.

        A gateway counts a request for its most specific slice; every request counts for the whole
        traffic.
        """
        served: dict[str, dict[str, int]] = {}
        for gateway in self._known.values():
            for name, n in _numbers(gateway.counts, "answers").items():
                slice_, _, pool = name.partition("\t")
                for place in {slice_, WHOLE}:
                    by_pool = served.setdefault(place, {})
                    by_pool[pool] = by_pool.get(pool, 0) + int(n)
        return served

    def status(
        self, taken: Mapping[tuple[str, float], int], behind: Mapping[tuple[str, float], int]
    ) -> tuple[GatewayStatus, ...]:
        return tuple(
            GatewayStatus(
                name=name,
                start=gateway.start,
                heard=gateway.heard,
                version=gateway.version,
                taken=taken.get((name, gateway.start), 0),
                behind=behind.get((name, gateway.start), 0),
                skew_s=gateway.skew_s,
                counts=gateway.counts,
            )
            for name, gateway in sorted(self._known.items())
        )

    def _alive(self, now: float) -> list[_Gateway]:
        for gateway in self._known.values():
            gateway.heard = min(gateway.heard, now)  # the clock was set back
        for name in [n for n, gateway in self._known.items() if now - gateway.heard > _KEPT_S]:
            del self._known[name]
        return [gateway for gateway in self._known.values() if now - gateway.heard <= ALIVE_S]

    def _peak(self, pool: str, now: float) -> float:
        """The sum over gateways of their recent peaks."""
        return math.fsum(g.largest("peak", now).get(pool, 0.0) for g in self._alive(now))


def _replica(replica: Replica, servers: Sequence[Any]) -> ReplicaStatus:
    """The status of a replica, from what each gateway reports about the servers of its pool."""
    of = (_mapping(known, base_of(replica.url)) for known in servers if isinstance(known, Mapping))
    told = [report for report in of if isinstance(report.get("up"), bool)]
    out = [report for report in told if not report["up"]]
    return ReplicaStatus(
        url=base_of(replica.url),
        weight=replica.weight,
        used_at=len(told) - len(out),
        out_at=len(out),
        why=next((why for report in out if isinstance(why := report.get("why"), str) and why), ""),
        in_flight=int(sum(_numbers({"of": report}, "of").get("in_flight", 0) for report in told)),
    )


def _report(counts: Mapping[str, Any], now: float) -> _Report:
    decisions = _numbers(counts, "decisions").items()
    return _Report(
        now,
        _numbers(counts, "launched"),
        _sum({name.partition("\t")[0]: n} for name, n in decisions),
        _numbers(counts, "peak"),
        _numbers(counts, "slice_in_flight"),
    )


def _numbers(counts: Mapping[str, Any], key: str) -> dict[str, float]:
    return dict(numbers(counts.get(key)))


def _mapping(counts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = counts.get(key)
    return value if isinstance(value, Mapping) else {}


def _merged(
    merge: Callable[[float, float], float], reports: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    merged: dict[str, float] = {}
    for counts in reports:
        for name, n in counts.items():
            merged[name] = merge(merged.get(name, 0.0), n)
    return merged


_most, _sum = partial(_merged, max), partial(_merged, operator.add)


# The split of a promotion's step on live traffic: whether infer serves the planned share of users.
#
# The unit and the test are those of the clause `sample_ratio`: a user, by the first request on the
# step.  A user counts at its dispatch, for the pool that is asked first, because fast replies come
# earlier than slow ones; if infer gives no reply, the user is moved to stable.  So the count of
# infer lies between the number that it served in the end and the number that the split gave to it,
# for the same users.  The evidence for a smaller share falls with this count and the evidence for a
# larger one rises, so the mean of both is at most that of an e-process whose steps have both
# outcomes: an alarm at any time is as rare as the threshold promises.

_USERS = 200_000  # of a step that are remembered; later ones are not counted


@dataclass
class SplitRecord:
    """The users of one step, since its leader began.

    Args:
        run, leg: the promotion and its step.
        planned: share of the users that infer was to serve, in (0, 1].
        tolerance: relative difference that is permitted, in [0, 1).

    Attributes:
        users, infer: users that count, and those of them that infer served.
        causes: "failover" or "breaker" -> users whom stable served in infer's place.
        apart: reason -> users to whom the share does not apply.
        log_e: largest evidence against the planned share, nats.
    """

    run: str
    leg: str
    planned: float
    tolerance: float
    users: int = 0
    infer: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)
    log_e: float = 0.0
    _first: dict[str, Assignment] = field(default_factory=dict)

    def record(self, assignments: Iterable[Assignment]) -> None:
        """Add users; those of another step are skipped, and so is a user that was added before."""
        for one in assignments:
            if (one.run, one.leg) != (self.run, self.leg):
                continue
            first = self._first.get(one.key)
            if first is None and len(self._first) < _USERS:
                self._first[one.key] = one
                self._count(one)
            elif first is not None and first.hit and one.because == FAILOVER and one.at == first.at:
                self._first[one.key] = one
                if not one.apart:
                    self.infer -= 1
                    self.causes[FAILOVER] += 1
        if self.users:
            test = PlannedShare(self.planned, self.tolerance)
            self.log_e = max(self.log_e, float(test.log_e(self.infer, self.users)))

    def _count(self, one: Assignment) -> None:
        if one.apart:
            self.apart[one.apart] += 1
            return
        self.users += 1
        self.infer += one.hit
        if one.because:
            self.causes[one.because] += 1
