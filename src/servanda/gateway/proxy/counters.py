# Counters of a gateway since its start, which the controller adds up, and the guard around all that
# only observes requests.

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from servanda.gateway.routing.model import Decision, Pool

WHOLE = "all"
OBSERVERS = ("capture", "counters", "log", "mirror")
FAILED = "the observer failed"  # reason of a row without a response
_LARGEST = 2**53  # of a count
_log = logging.getLogger(__name__)
# upper bounds of buckets, seconds; one more bucket holds what is above them
OVERHEAD_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
# delay from a sampled request to its evidence
LAG_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Histogram:
    """A histogram of seconds.

    Not `prometheus_client.Histogram`, whose buckets are available only from `collect`, cumulated.

    Args:
        bounds: upper bounds, increasing; buckets: count of each, not cumulative.
    """

    bounds: tuple[float, ...]
    buckets: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = self.buckets or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def to_dict(self) -> dict[str, Any]:
        """{"buckets": {bound: count between it and the bound before}, "sum": seconds}.

        >>> told = Histogram((0.1, 1.0), [3, 0, 2], 70.0).to_dict()
        >>> told["buckets"], told["sum"]
        ({'0.1': 3, '1.0': 0, 'inf': 2}, 70.0)
        """
        names = (*map(repr, self.bounds), "inf")
        return {"buckets": dict(zip(names, self.buckets, strict=True)), "sum": self.sum}


@dataclass
class Counts:
    """Cumulative since the gateway's start, unless stated; mirrored requests are in no other count.

    Args:
        decisions: "slice\\tpool\\treason" -> requests, counted for the most specific slice.
        statuses: "pool\\tstatus" -> replies: 2xx, 4xx, 5xx, or connect, timeout, broken, gone.
        replicas: "pool\\turl\\tstatus" -> the same of pools that have replicas.
        servers: pool -> url -> state of a replica, as in `ServerPool.report`.
        answers: "slice\\tpool" -> requests whose reply came from that pool, "none" without a
            reply, counted for the most specific slice.
        failovers: reason -> requests that failed over from infer to stable: connect, timeout,
            broken, 5xx, or breaker if infer was not tried.
        first_byte: pool -> seconds from the dispatch to the first byte of the reply's body.
        sampled, dropped: number of sampled requests, and of dropped ones among them.
        unsampled: reason -> requests selected for the sample that are no evidence.
        mirrored, mirror_dropped: number of mirrored requests, and of those dropped at the limit.
        launched: slice -> requests sent to infer, counted for every slice of a request.
        in_flight: pool -> requests now; peak: maximum since the last report.
        slice_in_flight: slice -> mean number of requests at infer since the last report.
        pools: pool -> "closed", or "open" if its circuit breaker is open.
        refused_keys: "gateway" -> number of keys that were given and are no client's.
        reflexes: kind -> number of faults that need no statistics.
        log: the problem of the log of sampled requests, "" if none.
        prompts: of sampled responses, whether infer ran the same prompt tokens as stable: "equal",
            "other", or "unknown" if stable did not report them.
        observer_failed: observer -> its exceptions, see `Guard`; each begins at 0, so that a first
            one is an increase.
    """

    decisions: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    failovers: dict[str, int] = field(default_factory=dict)
    overhead: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_S))
    first_byte: dict[str, Histogram] = field(
        default_factory=lambda: {pool: Histogram(FIRST_BYTE_S) for pool in ("infer", "stable")}
    )
    sampled: int = 0
    dropped: int = 0
    unsampled: dict[str, int] = field(default_factory=dict)
    mirrored: int = 0
    mirror_dropped: int = 0
    launched: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=lambda: {"infer": 0, "stable": 0})
    peak: dict[str, int] = field(default_factory=lambda: {"infer": 0, "stable": 0})
    slice_in_flight: dict[str, float] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)
    refused_keys: dict[str, int] = field(default_factory=dict)
    reflexes: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    observer_failed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OBSERVERS, 0))
    log: str = ""

    def decided(self, decision: Decision) -> None:
        name = _of(decision)
        add(self.decisions, f"{name}\t{decision.pool or 'refused'}\t{decision.reason}")

    def replied(self, decision: Decision, pool: Pool | None, first_s: float | None) -> None:
        """Record the pool of a reply and the time to its first byte."""
        add(self.answers, f"{_of(decision)}\t{pool or 'none'}")
        if pool is not None and first_s is not None:
            self.first_byte[pool].add(first_s)

    def answered(self, pool: str, status: str) -> None:
        add(self.statuses, f"{pool}\t{status}")

    def begun(self, pool: Pool) -> None:
        now = self.in_flight[pool] = self.in_flight[pool] + 1
        if now > self.peak[pool]:
            self.peak[pool] = now

    def ended(self, pool: Pool) -> None:
        self.in_flight[pool] -= 1

    def report(self) -> dict[str, Any]:
        """All counts as JSON data; resets those that count since the last report."""
        report = asdict(self)
        report["overhead"] = self.overhead.to_dict()
        report["first_byte"] = {pool: of.to_dict() for pool, of in self.first_byte.items()}
        self.peak = dict(self.in_flight)
        return report


def _of(decision: Decision) -> str:
    return next((name for name in decision.slices if name != WHOLE), WHOLE)


def numbers(counts: Any) -> Iterator[tuple[str, Any]]:
    """The valid counts of a mapping from a gateway."""
    if isinstance(counts, Mapping):
        for key, n in counts.items():
            if isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < _LARGEST:
                yield str(key), n


def add(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


class Guard:
    """Guards a request against one of its observers: `with guard:` suppresses every exception.

    The request continues as if it was not observed.  The exception is counted; the first of a kind
    is logged by its type and place alone, because its message may quote a user.
    """

    def __init__(self, name: str, counts: Counts) -> None:
        self._name, self._failed = name, counts.observer_failed
        self._known: set[tuple[str, str]] = set()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is None or trace is None or not issubclass(kind, Exception):
            return False
        add(self._failed, self._name)
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
        if (kind.__name__, place) not in self._known:
            self._known.add((kind.__name__, place))
            _log.error(
                "observer %s failed: %s at %s; requests are answered without it, and more failures "
                "of this kind are only counted (servanda_observer_failed_total): report this line",
                *(self._name, kind.__name__, place),
            )
        return True


class Observers:
    """The guards of a gateway, by what they guard."""

    def __init__(self, counts: Counts) -> None:
        guards = (Guard(name, counts) for name in OBSERVERS)
        self.capture, self.counters, self.log, self.mirror = guards


class InFlightMeans:
    """The time-averaged number of requests in flight at infer, per slice."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, clock()
        self._now: dict[str, int] = {}
        self._area: dict[str, float] = {}
        self._moved: dict[str, float] = {}

    def move(self, slices: tuple[str, ...], by: int) -> None:
        """Record that requests of these slices begin (1) or end (-1)."""
        at = self._clock()
        for name in slices:
            self._settle(name, at)
            self._now[name] = self._now.get(name, 0) + by

    def means(self) -> dict[str, float]:
        """The means since the last call."""
        at = self._clock()
        span = at - self._since
        for name in [*self._now]:
            self._settle(name, at)
        means = {name: area / span if span > 0 else 0.0 for name, area in self._area.items()}
        self._since, self._area = at, {}
        self._now = {name: n for name, n in self._now.items() if n}
        self._moved = dict.fromkeys(self._now, at)
        return means

    def _settle(self, name: str, at: float) -> None:
        since = self._moved.get(name, at)
        self._area[name] = self._area.get(name, 0.0) + self._now.get(name, 0) * (at - since)
        self._moved[name] = at
