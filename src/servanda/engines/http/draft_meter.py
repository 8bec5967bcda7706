# How many draft tokens a server's target accepts, from its page of metrics.
#
# vLLM counts drafts, their tokens, and the accepted ones by depth (vLLM 0.32); so does
# llama-server, under its own prefix.  SGLang counts, when a request ends, its verifications and its
# tokens: each verification gives its accepted tokens and one more, and the first token of a
# response needs none.  Tokens behind the end of a response are cut off and count as not accepted.

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from servanda.engines.http.transport import Limits, Transport
from servanda.engines.http_policy import RetryPolicy
from servanda.errors import EvidenceError, MeasurementError
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.traces.drafts import COUNTED

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'\bposition="(\d+)"')
# a trainer's step does not wait for a page
_LIMITS = Limits(connect_s=5.0, read_s=10.0, retry=RetryPolicy(tries=2), most_bytes=1 << 24)
_VLLM, _SGLANG, _LLAMA = "vllm:spec_decode_num_", "sglang:", "llamacpp:spec_decode_num_"


class Counters(NamedTuple):
    """The counters of a page, summed over its engines; steps: tokens of a draft, of SGLang."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    by_depth: tuple[int, ...] = ()
    steps: int = 0


class DraftMeter:
    """Counts the drafts of engines between two readings: `Monitor.observe(..., drafts=meter)`.

    Read each server from one rank only, because the counts of all ranks are added.

    Args:
        sources: URLs of servers (vLLM, SGLang, llama-server), or functions that return a page in
            Prometheus' format, such as prometheus_client.generate_latest.

    Raises:
        MeasurementError: a source cannot be reached, or its page has no counters of drafts.
    """

    def __init__(self, *sources: str | Callable[[], str | bytes]) -> None:
        self._pages = [_of_server(s) if isinstance(s, str) else s for s in sources]
        self._names = [s if isinstance(s, str) else "the page" for s in sources]
        self.problem = ""
        self._last: list[Counters] | None = self._read()

    def read(self) -> DraftCounts | None:
        """The increase since the last reading, over all sources.

        Returns:
            None if it is unknown: a source was not reached, or began again; see `problem`.
        """
        last, self._last, self.problem = self._last, None, ""
        try:
            self._last = self._read()
            if last is None:
                return None
            parts = zip(last, self._last, strict=True)
            return sum((_increase(*counters) for counters in parts), DraftCounts())
        except (MeasurementError, EvidenceError) as error:
            self.problem = f"drafts were not counted: {error.args[0]}"
            return None

    def _read(self) -> list[Counters]:
        return [counters(page(), name) for page, name in zip(self._pages, self._names, strict=True)]


def counters(page: str | bytes, name: str = "the page") -> Counters:
    """The counters of drafts on a page of metrics.

    Raises:
        MeasurementError: there are none.
    """
    text = page.decode(errors="replace") if isinstance(page, bytes) else page
    sums: dict[str, float] = {}
    depths: dict[int, float] = {}
    for metric, labels, value in _LINE.findall(text):
        if metric.startswith(_LLAMA):
            metric = _VLLM + metric.removeprefix(_LLAMA)
        if not metric.startswith((_VLLM, _SGLANG)):
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            continue
        at = _POSITION.search(labels)
        if at is not None and metric == f"{_VLLM}accepted_tokens_per_pos_total":
            depths[int(at[1])] = depths.get(int(at[1]), 0.0) + number
        elif metric == f"{_SGLANG}spec_num_steps":
            sums[metric] = max(number, sums.get(metric, 0.0))  # a setting, equal on all ranks
        else:
            sums[metric] = sums.get(metric, 0.0) + number
    if f"{_VLLM}drafts_total" in sums:
        drafts, proposed, accepted = (
            int(sums.get(f"{_VLLM}{of}_total", 0))
            for of in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return Counters(drafts, proposed, accepted, tuple(int(depths[i]) for i in sorted(depths)))
    if not any(metric.startswith(_SGLANG) for metric in sums):
        raise MeasurementError(
            f"{name} has no counters of drafts among its metrics",
            hint="start vLLM with --speculative-config, SGLang with --enable-metrics and "
            "--speculative-algorithm, or llama-server with --metrics and --spec-type",
        )
    drafts, tokens, requests, steps = (
        int(sums.get(f"{_SGLANG}{of}", 0))
        for of in (
            *("spec_verify_calls_total", "generation_tokens_total"),
            *("num_requests_total", "spec_num_steps"),
        )
    )
    if not drafts:  # SGLang names the counter from its first draft on
        return Counters()
    return Counters(drafts, drafts * steps, max(0, tokens - drafts - requests), (), steps)


def meter_of(transport: Transport) -> DraftMeter | None:
    """The meter of a server that is met; None where it has no counters of drafts."""
    try:
        return DraftMeter(lambda: transport.text("/metrics") or "")
    except MeasurementError:
        return None


def drafts_since(meter: DraftMeter | None) -> dict[str, str]:
    """`Trace.about` of the drafts since the last reading; nothing where none was counted.

    They are those of all requests of the server, which has to serve no one else meanwhile.
    """
    counts = None if meter is None else meter.read()
    return {COUNTED: json.dumps(asdict(counts))} if counts is not None and counts.drafts else {}


def _increase(before: Counters, after: Counters) -> DraftCounts:
    """The counts between two readings.

    Raises:
        EvidenceError: the server began again or was set otherwise, or counts contradict each other.
    """
    if before.drafts and (before.steps, len(before.by_depth)) != (after.steps, len(after.by_depth)):
        raise EvidenceError("the length of drafts changed")
    depths = before.by_depth or (0,) * len(after.by_depth)
    pairs = [*zip(after[:3], before[:3], strict=True), *zip(after.by_depth, depths, strict=True)]
    if any(now < then for now, then in pairs):
        raise EvidenceError("a counter went back: the server was restarted")
    drafts, proposed, accepted, *by_depth = (now - then for now, then in pairs)
    return DraftCounts(drafts, proposed, accepted, tuple(by_depth), after.steps)


def _of_server(url: str) -> Callable[[], str]:
    transport = Transport(url, 1, _LIMITS)

    def page() -> str:
        text = transport.text("/metrics")
        if text is None:
            raise MeasurementError(
                f"{url} has no page /metrics",
                hint="start SGLang with --enable-metrics; name the engine itself, not a router",
            )
        return text

    return page
