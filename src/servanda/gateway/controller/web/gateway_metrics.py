# The counters of gateways as Prometheus series.  Each label value is a word of this file or of the
# contract, and no counter falls when a gateway ends.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from servanda.gateway.controller.status import GatewayStatus
from servanda.gateway.proxy.counters import numbers
from servanda.gateway.routing.model import STATUSES

DECIDED = ("infer", "stable", "refused")
ANSWERING = ("infer", "stable")
ANSWERED = (*ANSWERING, "none")
FAILOVERS = ("connect", "timeout", "broken", "5xx", "breaker")
COMPARED = ("equal", "other", "unknown")
REPLIES = ("2xx", "3xx", "4xx", "5xx", "connect", "timeout", "broken", "gone")
_PLAIN_REASONS = ("share", "split", "session", "outside", "expired", "no snapshot")
REASONS = (*_PLAIN_REASONS, "pinned", *STATUSES, "other")


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
