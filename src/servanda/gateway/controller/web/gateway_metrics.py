# What gateways count, as series for Prometheus: each value of a label is a word of this file or
# of the contract, and no count falls when a gateway ends.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from servanda.gateway.controller.status import GatewayStanding
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


class Ended:
    """Counts of gateways, with those of processes that have ended.

    Args:
        read: from what a gateway counts.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], Counter[Any]]) -> None:
        self._read = read
        self._ended: Counter[Any] = Counter()
        self._running: dict[tuple[str, float], Counter[Any]] = {}

    def of(self, gateways: Iterable[GatewayStanding]) -> Counter[Any]:
        now = {(one.name, one.start): self._read(one.counts) for one in gateways}
        for which, counts in self._running.items():
            if which not in now:
                self._ended.update(counts)
        self._running = now
        total = Counter(self._ended)
        for counts in now.values():
            total.update(counts)
        return total


def among(known: Collection[str]) -> Callable[[str], str]:
    """A part of a key as a label: one of the known words, or "other"."""
    return lambda part: part if part in known else "other"


def tally(name: str, *labels: Callable[[str], str]) -> Ended:
    """One of a gateway's counts, whose keys are as many words as there are labels."""

    def read(counts: Mapping[str, Any]) -> Counter[tuple[str, ...]]:
        found: Counter[tuple[str, ...]] = Counter()
        for key, n in numbers(counts.get(name)):
            parts = key.split("\t", len(labels) - 1)
            parts += [""] * (len(labels) - len(parts))
            found[tuple(of(part) for of, part in zip(labels, parts, strict=True))] += n
        return found

    return Ended(read)


def counter(
    name: str, says: str, contract: str, labels: tuple[str, ...], found: Mapping[Any, float]
) -> Metric:
    """One counter; `found` has the values of the labels."""
    family = CounterMetricFamily(name, says, labels=("contract", *labels))
    for values, n in sorted(found.items()):
        family.add_metric((contract, *values), n)
    return family


def of_pool(told: Any, key: str) -> Any:
    return told.get(key) if isinstance(told, Mapping) else None


def reason(text: str) -> str:
    """A reason without the name of the slice, which is a label of its own.

    >>> reason("long quarantined"), reason("long pinned"), reason("share"), reason("?")
    ('quarantined', 'pinned', 'share', 'other')
    """
    if text in _PLAIN_REASONS:
        return text
    last = text.rpartition(" ")[2]
    return last if last in REASONS else "other"


def spent(told: Any) -> Counter[float | str]:
    """Bound of a bucket -> requests in it, and the sum of their seconds.

    Args:
        told: {"buckets": {bound: n}, "sum": s}.
    """
    found: Counter[float | str] = Counter()
    if isinstance(told, Mapping):
        for bound, n in numbers(told.get("buckets")):
            found[_bound(bound)] += n
        found.update(dict(numbers({"sum": told.get("sum")})))
    return found


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def merged(spent: Counter[Any]) -> tuple[dict[float, float], float]:
    """Buckets by bound, not yet added up, and the sum."""
    return {bound: n for bound, n in spent.items() if bound != "sum"}, spent["sum"]


def histogram(
    name: str,
    says: str,
    contract: str,
    found: Iterable[tuple[tuple[str, ...], tuple[dict[float, float], float]]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """One histogram; `found` has the values of the labels, the buckets and the sum of each."""
    family = HistogramMetricFamily(name, says, labels=("contract", *labels))
    for values, (buckets, total) in found:
        if not buckets:
            continue
        bounds = sorted({*buckets, math.inf})
        added = accumulate(buckets.get(bound, 0) for bound in bounds)
        texts = ["+Inf" if math.isinf(bound) else repr(bound) for bound in bounds]
        family.add_metric((contract, *values), [*zip(texts, added, strict=True)], total)
    return family
