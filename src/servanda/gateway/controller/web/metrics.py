# The series of a controller, and of the gateways that follow it, for Prometheus.
#
# Label values come only from the contract and this file, so that no client can create a series. The
# counts of each gateway process start at 0; counts of ended processes are kept, so that no counter
# here falls.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from servanda._version import __version__
from servanda.gateway.controller.gateways import ALIVE_S
from servanda.gateway.controller.status import CellStatus, ControllerStatus, GatewayStatus
from servanda.gateway.proxy.counters import OBSERVERS, numbers
from servanda.gateway.proxy.logprob_request import REASONS as NO_EVIDENCE
from servanda.gateway.routing.model import STATUSES

# of a transition: a status, a pin, or more transitions than the status lists
_STEPS = (*STATUSES, "pinned", "other", "unseen")
# name, help and labels of the gateways' counts, and how they are read
_COUNTED = (
    (
        "route_decisions",
        "Requests by most specific slice, pool and reason, of all gateways.",
        ("slice", "pool", "reason"),
        lambda: counts_of("decisions", str, among(DECIDED), reason),
    ),
    # the pool that served in the end, not always the decided one
    (
        "route_answers",
        "Requests by most specific slice and the pool whose reply they got.",
        ("slice", "pool"),
        lambda: counts_of("answers", str, among(ANSWERED)),
    ),
    (
        "upstream_replies",
        "Replies of upstreams by status, and attempts that ended without one.",
        ("pool", "status"),
        lambda: counts_of("statuses", str, among(REPLIES)),
    ),
    (
        "upstream_requests",
        "The same by replica, of pools that have several.",
        ("pool", "replica", "status"),
        lambda: counts_of("replicas", str, str, among(REPLIES)),
    ),
    (
        "failovers",
        "Requests that failed over to stable because infer gave no reply.",
        ("reason",),
        lambda: counts_of("failovers", among(FAILOVERS)),
    ),
    (
        "unsampled",
        "Sampled requests that are no evidence, by reason.",
        ("reason",),
        lambda: counts_of("unsampled", among(NO_EVIDENCE)),
    ),
    (
        "prompt_checks",
        "Sampled responses by whether infer ran the same prompt as stable.",
        ("result",),
        lambda: counts_of("prompts", among(COMPARED)),
    ),
    (
        "observer_failed",
        "Exceptions in what only observes requests; no user's answer is changed by one.",
        ("observer",),
        lambda: counts_of("observer_failed", among(OBSERVERS)),
    ),
)
DECIDED = ("infer", "stable", "refused")
ANSWERING = ("infer", "stable")
ANSWERED = (*ANSWERING, "none")
FAILOVERS = ("connect", "timeout", "broken", "5xx", "breaker")
COMPARED = ("equal", "other", "unknown")
REPLIES = ("2xx", "3xx", "4xx", "5xx", "connect", "timeout", "broken", "gone")
_PLAIN_REASONS = ("share", "split", "session", "outside", "expired", "no snapshot")
REASONS = (*_PLAIN_REASONS, "pinned", *STATUSES, "other")


class Metrics(Collector):
    """The series of one controller, in a registry of their own.

    Args:
        refused: the number of keys that its listener refused.
    """

    def __init__(self, status: Callable[[], ControllerStatus], refused: Callable[[], int]) -> None:
        self._status, self._refused = status, refused
        self._refused_by_gateways = counts_of("refused_keys", among(("gateway",)))
        self._one_at_a_time = Lock()
        self._counted = {name: counts() for name, _, _, counts in _COUNTED}
        self._overhead = CumulativeCounts(lambda counts: seconds_of(counts.get("overhead")))
        self._first_byte = {pool: CumulativeCounts(_first_byte_of(pool)) for pool in ANSWERING}
        self._steps: Counter[tuple[str, str]] = Counter()
        self._last_step = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text for a scraper that accepts these types, and its content type."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def describe(self) -> Iterable[Metric]:
        return ()  # registering needs no status

    def collect(self) -> Iterator[Metric]:
        with self._one_at_a_time:
            yield from self._families(self._status())

    def _families(self, status: ControllerStatus) -> Iterator[Metric]:
        yield leads(status.name, True)
        yield from _about(status)
        yield from _samples(status)
        yield from _cells(status)
        yield from _split(status)
        name, gateways = status.name, status.gateways
        by_gateways = self._refused_by_gateways.total(gateways)
        yield refused_keys(name, self._refused(), by_gateways["gateway",])
        # a first label, and a replica, is a word of the contract, or of this program
        replicas = [(p, r) for p, pool in status.pools.items() for r in pool.replicas]
        known = {"slice": {"all", *(s.name for s in status.slices)}, "pool": {*ANSWERING}}
        urls = {(pool, replica.url) for pool, replica in replicas}
        for metric, says, labels, _ in _COUNTED:
            total = sorted(self._counted[metric].total(gateways).items())
            first = known.get(labels[0])
            values = [(words, n) for words, n in total if first is None or words[0] in first]
            if "replica" in labels:
                values = [(words, n) for words, n in values if words[:2] in urls]
            yield counter(metric, says, name, values, labels)
        yield gauge(
            "breaker_open",
            "Gateways whose circuit breaker keeps requests from a pool.",
            name,
            [((p,), status.pools[p].open_at) for p in ANSWERING if p in status.pools],
            ("pool",),
        )
        yield gauge(
            "upstream_up",
            "1 if every gateway sends requests to the replica, 0 if one does not.",
            name,
            [((p, r.url), not r.out_at) for p, r in replicas if r.out_at or r.used_at],
            ("pool", "replica"),
        )
        yield histogram(
            "upstream_first_byte_seconds",
            "Between asking a pool and the first byte of its reply's body.",
            name,
            [((pool,), counts.total(gateways)) for pool, counts in self._first_byte.items()],
            ("pool",),
        )
        yield histogram(
            "gateway_overhead_seconds",
            "Seconds of a request that were not spent waiting for an upstream.",
            name,
            [((), self._overhead.total(gateways))],
        )
        yield self._transitions(status)

    def _transitions(self, status: ControllerStatus) -> Metric:
        new = [t for t in status.transitions if t.number > self._last_step]
        if status.moves > self._last_step:
            self._steps.update((_step(t.before), _step(t.after)) for t in new)
            unseen = status.moves - self._last_step - len(new)
            if self._last_step and unseen > 0:
                self._steps["unseen", "unseen"] += unseen
            self._last_step = status.moves
        steps = sorted(self._steps.items())
        says = "Changes of slices, acted on or not."
        return counter("transitions", says, status.name, steps, ("from", "to"))


def leads(name: str, leading: bool) -> Metric:
    """Whether a leader of a contract leads."""
    says = "1 if this leader leads, 0 if it waits until another one is gone."
    return gauge("leads", says, name, [((), leading)])


def refused_keys(name: str, by_leader: int, by_gateways: int = 0) -> Metric:
    """The keys that a leader refused, and those that its gateways refused."""
    says = "Keys that were given and do not open the listener."
    values = [(("leader",), by_leader), (("gateway",), by_gateways)]
    return counter("refused_keys", says, name, values, ("listener",))


def _first_byte_of(pool: str) -> Callable[[Mapping[str, Any]], Counter[Any]]:
    def read(counts: Mapping[str, Any]) -> Counter[Any]:
        by_pool = counts.get("first_byte")
        return seconds_of(by_pool.get(pool) if isinstance(by_pool, Mapping) else None)

    return read


def _step(text: str) -> str:
    """One word for the status of a slice.

    >>> _step("active"), _step("active, pinned to stable"), _step("gone")
    ('active', 'pinned', 'other')
    """
    return text if text in _STEPS else "pinned" if ", pinned to " in text else "other"


def _about(status: ControllerStatus) -> Iterator[Metric]:
    yield gauge(
        "info",
        "1; the digest of the contract, and the version of servanda.",
        status.name,
        [((__version__, status.contract, status.mode), 1)],
        ("version", "digest", "mode"),
    )
    gauges: tuple[tuple[str, str, float | None], ...] = (
        (
            "infer_weight_ratio",
            "Share of all traffic that infer serves, before diversions.",
            status.base,
        ),
        ("diverted_ratio", "Share of all traffic that slices divert from infer.", status.diverted),
        ("snapshot_version", "Number of the current route.", status.version),
        (
            "snapshot_age_seconds",
            "Seconds since the current route was made.",
            max(0.0, status.now - status.made) if status.made else None,
        ),
        (
            "snapshot_valid_seconds",
            "Seconds until the current route expires, unless it is renewed.",
            status.valid_until - status.now,
        ),
        (
            "gateways",
            "Gateways that contacted the leader in the last ten seconds.",
            sum(status.now - gateway.heard <= ALIVE_S for gateway in status.gateways),
        ),
        ("problems", "Problems that the page lists.", len(status.problems)),
    )
    for name, says, value in gauges:
        yield gauge(name, says, status.name, [((), value)] if value is not None else [])


def _samples(status: ControllerStatus) -> Iterator[Metric]:
    name, scoring = status.name, status.scoring
    yield counter(
        "samples",
        "Sampled requests: scored, dropped because the queue was full, or without a logprob.",
        name,
        [
            (("scored",), scoring.scored),
            (("dropped",), scoring.dropped),
            (("error",), scoring.missing),
        ],
        ("outcome",),
    )
    says = "Samples in the queue for scoring."
    yield gauge("rescore_queue_depth", says, name, [((), scoring.queued)])
    says = "Seconds of the train kernel that scoring took."
    yield counter("rescore_engine_seconds", says, name, [((), scoring.seconds)])
    says = "Seconds between the dispatch of a request and its evidence."
    yield histogram("rescore_lag_seconds", says, name, [((), seconds_of(scoring.lags))])


def _split(status: ControllerStatus) -> Iterator[Metric]:
    """Empty without a clause about the split, or without a promotion."""
    name, split = status.name, status.split
    says = "Users of a promotion's step by the pool that served the first request."
    users = [(("infer",), split.infer), (("stable",), split.users - split.infer)] if split else []
    yield gauge("split_users", says, name, users, ("pool",))
    for metric, says, value in (
        ("planned_ratio", "Share of the users that infer was to serve.", split and split.planned),
        ("log_evidence", "Log e-value against that share, in nats.", split and split.log_evidence),
        ("log_price", "Log e-value threshold of an alarm, in nats.", split and split.log_price),
    ):
        yield gauge(f"split_{metric}", says, name, [((), value)] if value is not None else [])


def _verdict(cell: CellStatus) -> int:
    return {"violated": 3, "holds": 0}.get(cell.tick.outcome, 1)


_OF_CELLS: tuple[tuple[str, str, Callable[[CellStatus], float | None]], ...] = (
    ("verdict", "0 within the limit, 1 not decided, 3 exceeds the limit.", _verdict),
    ("estimate", "Estimate of the metric, in its own unit.", lambda cell: cell.value),
    (
        "bound_lower",
        "Two standard errors below the estimate.",
        lambda cell: cell.interval and cell.interval[0],
    ),
    (
        "bound_upper",
        "Two standard errors above the estimate.",
        lambda cell: cell.interval and cell.interval[1],
    ),
    ("limit", "Limit of the contract.", lambda cell: None if cell.refutes else cell.limit),
    ("log_evidence", "Log e-value against the limit, in nats.", lambda cell: cell.log_evidence),
    ("log_price", "Log e-value threshold of a diversion, in nats.", lambda cell: cell.log_price),
)


def _cells(status: ControllerStatus) -> Iterator[Metric]:
    name, slices = status.name, status.slices
    cells = [(slice_.name, cell) for slice_ in slices for cell in slice_.cells]
    for metric, says, value_of in _OF_CELLS:
        values = [((cell.clause, slice_), value_of(cell)) for slice_, cell in cells]
        known = [(labels, n) for labels, n in values if n is not None and not math.isnan(n)]
        yield gauge(f"clause_{metric}", says, name, known, ("clause", "slice"))
    states = [((s.name, state), s.status == state) for s in slices for state in STATUSES]
    says = "1 for the state that a slice is in."
    yield gauge("slice_state", says, name, states, ("slice", "state"))
    says = "Whether that state is acted on."
    yield gauge("slice_acts", says, name, [((s.name,), s.acts) for s in slices], ("slice",))


# The counters of gateways as Prometheus series.  Each label value is a word of this file or of the
# contract, and no counter falls when a gateway ends.


class CumulativeCounts:
    """The counts of all gateways, including ended processes.

    Args:
        read: extracts the counts from a gateway's report.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], Counter[Any]]) -> None:
        self._read = read
        self._ended: Counter[Any] = Counter()
        self._running: dict[tuple[str, float], Counter[Any]] = {}

    def total(self, gateways: Iterable[GatewayStatus]) -> Counter[Any]:
        now = {(gateway.name, gateway.start): self._read(gateway.counts) for gateway in gateways}
        for process, counts in self._running.items():
            if process not in now:
                self._ended.update(counts)
        self._running = now
        total = Counter(self._ended)
        for counts in now.values():
            total.update(counts)
        return total


def among(known: Collection[str]) -> Callable[[str], str]:
    """A part of a key as a label: one of the known words, or "other"."""
    return lambda part: part if part in known else "other"


def counts_of(name: str, *labels: Callable[[str], str]) -> CumulativeCounts:
    """One of a gateway's counts; each key has as many words as there are labels."""

    def read(counts: Mapping[str, Any]) -> Counter[tuple[str, ...]]:
        total: Counter[tuple[str, ...]] = Counter()
        for key, n in numbers(counts.get(name)):
            parts = key.split("\t", len(labels) - 1)
            parts += [""] * (len(labels) - len(parts))
            total[tuple(label(part) for label, part in zip(labels, parts, strict=True))] += n
        return total

    return CumulativeCounts(read)


def reason(text: str) -> str:
    """A reason without the name of the slice, which is a separate label.

    >>> reason("long quarantined"), reason("long pinned"), reason("share"), reason("?")
    ('quarantined', 'pinned', 'share', 'other')
    """
    if text in _PLAIN_REASONS:
        return text
    last = text.rpartition(" ")[2]
    return last if last in REASONS else "other"


def seconds_of(histogram: Any) -> Counter[float | str]:
    """Bound of a bucket -> requests in it, and "sum" -> their seconds.

    Args:
        histogram: {"buckets": {bound: n}, "sum": s}.
    """
    total: Counter[float | str] = Counter()
    if isinstance(histogram, Mapping):
        for bound, n in numbers(histogram.get("buckets")):
            try:
                total[float(bound)] += n
            except ValueError:
                total[math.inf] += n
        total.update(dict(numbers({"sum": histogram.get("sum")})))
    return total


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    says: str,
    contract: str,
    values: Iterable[tuple[tuple[str, ...], float]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """One metric; `values` has the values of the labels, and the number of each."""
    family = kind(f"servanda_{name}", says, labels=("contract", *labels))
    for label_values, n in values:
        family.add_metric((contract, *label_values), n)
    return family


counter = partial(_family, CounterMetricFamily)
gauge = partial(_family, GaugeMetricFamily)


def histogram(
    name: str,
    says: str,
    contract: str,
    values: Iterable[tuple[tuple[str, ...], Counter[float | str]]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """One histogram; `values` has the values of the labels, and `seconds_of` each."""
    family = HistogramMetricFamily(f"servanda_{name}", says, labels=("contract", *labels))
    for label_values, counts in values:
        bounds = {bound for bound in counts if isinstance(bound, float)}
        if not bounds:
            continue
        ordered = sorted(bounds | {math.inf})
        added = accumulate(counts[bound] for bound in ordered)
        names = ["+Inf" if math.isinf(bound) else repr(bound) for bound in ordered]
        buckets = [*zip(names, added, strict=True)]
        family.add_metric((contract, *label_values), buckets, counts["sum"])
    return family
