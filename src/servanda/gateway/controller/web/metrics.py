# What Prometheus is told of a leader and of the gateways that follow it.
#
# Labels come from the contract and from the words of this file alone, so that nobody who sends
# a request can make a series.  What gateways count starts at 0 with each of their processes;
# what ended ones had counted is kept, so that no counter here ever falls.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from servanda._version import __version__
from servanda.gateway.controller.status import CellStanding, Standing
from servanda.gateway.controller.web.gateway_metrics import (
    ANSWERED,
    ANSWERING,
    COMPARED,
    DECIDED,
    FAILOVERS,
    REPLIES,
    Ended,
    among,
    counter,
    histogram,
    merged,
    of_pool,
    reason,
    spent,
    tally,
)
from servanda.gateway.controller.web.phrases import met
from servanda.gateway.proxy.logprob_request import REASONS as NO_EVIDENCE
from servanda.gateway.routing.model import STATUSES

_OUTCOMES = ("scored", "dropped", "error")
# of a transition: a status, a pin, or more than is shown between two looks
_STEPS = (*STATUSES, "pinned", "other", "unseen")


class Metrics:
    """The registry of one leader.

    Args:
        standing: how things stand now.
    """

    def __init__(self, standing: Callable[[], Standing]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Figures(standing))

    def told(self, accept: str = "") -> tuple[bytes, str]:
        """The text for a scraper that accepts these types, and its own type."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind


class _Figures(Collector):
    def __init__(self, standing: Callable[[], Standing]) -> None:
        self._standing = standing
        self._one_at_a_time = Lock()
        self._decisions = tally("decisions", str, among(DECIDED), reason)
        self._answers = tally("answers", str, among(ANSWERED))
        self._statuses = tally("statuses", str, among(REPLIES))
        self._failovers = tally("failovers", among(FAILOVERS))
        self._unsampled = tally("unsampled", among(NO_EVIDENCE))
        self._prompts = tally("prompts", among(COMPARED))
        self._overhead = Ended(lambda counts: spent(counts.get("overhead")))
        self._first_byte = {
            pool: Ended(lambda counts, pool=pool: spent(of_pool(counts.get("first_byte"), pool)))
            for pool in ANSWERING
        }
        self._steps: Counter[tuple[str, str]] = Counter()
        self._last_step = 0

    def describe(self) -> Iterable[Metric]:
        return ()  # registering asks nobody how things stand

    def collect(self) -> Iterator[Metric]:
        with self._one_at_a_time:
            yield from self._families(self._standing())

    def _families(self, standing: Standing) -> Iterator[Metric]:
        yield from _about(standing)
        yield from _samples(standing)
        yield from _cells(standing)
        known = {one.name for one in standing.slices} | {"all"}
        yield counter(
            "servanda_route_decisions",
            "Requests by most specific slice, pool and reason, of all gateways.",
            standing.name,
            ("slice", "pool", "reason"),
            self._known(self._decisions, standing, known),
        )
        yield from self._answered(standing, known)
        yield histogram(
            "servanda_gateway_overhead_seconds",
            "Seconds of a request that were not spent waiting for an upstream.",
            standing.name,
            [((), merged(self._overhead.of(standing.gateways)))],
        )
        yield self._transitions(standing)

    @staticmethod
    def _known(counts: Ended, standing: Standing, known: Collection[str]) -> dict[Any, float]:
        """Counts whose first label is a word of the contract, or of this program."""
        found = counts.of(standing.gateways)
        return {values: n for values, n in found.items() if values[0] in known}

    def _answered(self, standing: Standing, known: set[str]) -> Iterator[Metric]:
        """Who served in the end, which is not always who was to."""
        yield counter(
            "servanda_route_answers",
            "Requests by most specific slice and the pool whose reply they got.",
            standing.name,
            ("slice", "pool"),
            self._known(self._answers, standing, known),
        )
        yield counter(
            "servanda_upstream_replies",
            "Replies of upstreams by status, and tries that ended without one.",
            standing.name,
            ("pool", "status"),
            self._known(self._statuses, standing, ANSWERING),
        )
        yield counter(
            "servanda_failovers",
            "Requests that stable was asked because infer gave no reply.",
            standing.name,
            ("reason",),
            self._failovers.of(standing.gateways),
        )
        yield counter(
            "servanda_unsampled",
            "Requests that were drawn for the sample and are no evidence, by why they are none.",
            standing.name,
            ("reason",),
            self._unsampled.of(standing.gateways),
        )
        yield counter(
            "servanda_prompt_checks",
            "Sampled answers by whether infer ran the prompt that stable makes of the request.",
            standing.name,
            ("result",),
            self._prompts.of(standing.gateways),
        )
        open_ = GaugeMetricFamily(
            "servanda_breaker_open",
            "Gateways whose circuit breaker keeps requests from a pool.",
            labels=("contract", "pool"),
        )
        for pool in ANSWERING:
            if pool in standing.pools:
                open_.add_metric((standing.name, pool), standing.pools[pool].open_at)
        yield open_
        yield histogram(
            "servanda_upstream_first_byte_seconds",
            "Between asking a pool and the first byte of its reply's body.",
            standing.name,
            [((pool,), merged(of.of(standing.gateways))) for pool, of in self._first_byte.items()],
            labels=("pool",),
        )

    def _transitions(self, standing: Standing) -> Metric:
        new = [t for t in standing.transitions if t.number > self._last_step]
        if standing.moves > self._last_step:
            self._steps.update((_step(t.before), _step(t.after)) for t in new)
            unseen = standing.moves - self._last_step - len(new)
            if self._last_step and unseen > 0:
                self._steps["unseen", "unseen"] += unseen
            self._last_step = standing.moves
        family = CounterMetricFamily(
            "servanda_transitions",
            "Changes of slices, acted on or not.",
            labels=("contract", "from", "to"),
        )
        for (before, after), n in sorted(self._steps.items()):
            family.add_metric((standing.name, before, after), n)
        return family


def _step(text: str) -> str:
    """One word for where a slice was or came to.

    >>> _step("active"), _step("active, pinned to stable"), _step("gone")
    ('active', 'pinned', 'other')
    """
    return text if text in _STEPS else "pinned" if ", pinned to " in text else "other"


def _about(standing: Standing) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "servanda_info",
        "1; what is followed, and by which version of servanda.",
        labels=("contract", "version", "digest", "mode"),
    )
    info.add_metric((standing.name, __version__, standing.contract, standing.mode), 1)
    yield info
    gauges: tuple[tuple[str, str, float | None], ...] = (
        (
            "infer_weight_ratio",
            "Share of all traffic that infer serves where no slice says otherwise.",
            standing.base,
        ),
        ("diverted_ratio", "Share of all traffic that slices keep from infer.", standing.diverted),
        ("snapshot_version", "Number of the route that gateways are to follow.", standing.version),
        (
            "snapshot_age_seconds",
            "Since that route was made.",
            max(0.0, standing.now - standing.made) if standing.made else None,
        ),
        (
            "snapshot_valid_seconds",
            "Until it ends, unless it is renewed.",
            standing.valid_until - standing.now,
        ),
        ("problems", "Things that somebody should look at.", len(standing.problems)),
    )
    for name, says, value in gauges:
        family = GaugeMetricFamily(f"servanda_{name}", says, labels=("contract",))
        if value is not None:
            family.add_metric((standing.name,), value)
        yield family


def _samples(standing: Standing) -> Iterator[Metric]:
    scoring = standing.scoring
    family = CounterMetricFamily(
        "servanda_samples",
        "Sampled requests: scored, dropped for want of room, or without a number.",
        labels=("contract", "outcome"),
    )
    for outcome, n in zip(
        _OUTCOMES, (scoring.scored, scoring.dropped, scoring.missing), strict=True
    ):
        family.add_metric((standing.name, outcome), n)
    yield family
    depth = GaugeMetricFamily(
        "servanda_rescore_queue_depth", "Samples that wait to be scored.", labels=("contract",)
    )
    depth.add_metric((standing.name,), scoring.queued)
    yield depth
    seconds = CounterMetricFamily(
        "servanda_rescore_engine_seconds",
        "Seconds of the train kernel that scoring took.",
        labels=("contract",),
    )
    seconds.add_metric((standing.name,), scoring.seconds)
    yield seconds
    yield histogram(
        "servanda_rescore_lag_seconds",
        "Between the launch of a request and its evidence.",
        standing.name,
        [((), merged(spent(scoring.lags)))],
    )


_OF_CELLS: tuple[tuple[str, str, Callable[[CellStanding], float | None]], ...] = (
    (
        "verdict",
        "0 the limit is kept, 1 not decided, 3 it is broken.",
        lambda cell: _verdict(cell),
    ),
    ("estimate", "Of the metric, in its own unit.", lambda cell: cell.value),
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
    ("limit", "What the contract allows.", lambda cell: None if cell.refutes else cell.limit),
    ("log_evidence", "Nats, against the limit.", lambda cell: cell.log_evidence),
    ("log_price", "Nats at which a slice leaves infer.", lambda cell: cell.log_price),
)


def _verdict(cell: CellStanding) -> int:
    if cell.nearness >= 1:
        return 3
    return 0 if met(cell) and not cell.refutes else 1


def _cells(standing: Standing) -> Iterator[Metric]:
    for name, says, value_of in _OF_CELLS:
        family = GaugeMetricFamily(
            f"servanda_clause_{name}", says, labels=("contract", "clause", "slice")
        )
        for one in standing.slices:
            for cell in one.cells:
                value = value_of(cell)
                if value is not None and not math.isnan(value):
                    family.add_metric((standing.name, cell.clause, one.name), value)
        yield family
    states = GaugeMetricFamily(
        "servanda_slice_state",
        "1 for the state that a slice is in.",
        labels=("contract", "slice", "state"),
    )
    acts = GaugeMetricFamily(
        "servanda_slice_acts", "Whether that state is acted on.", labels=("contract", "slice")
    )
    for one in standing.slices:
        for status in STATUSES:
            states.add_metric((standing.name, one.name, status), one.status == status)
        acts.add_metric((standing.name, one.name), one.acts)
    yield states
    yield acts
