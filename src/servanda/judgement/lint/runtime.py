# Lint of the runtime: clauses about time, speed and batching, and the envelope.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from servanda.contract.clause import Clause, Relative, Section
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE
from servanda.theory.divergence.base import DIVERGENCES


@dataclass(frozen=True)
class RuntimeMetric:
    """The requirements of a clause on a runtime metric.

    Args:
        limit: which of the two limits it takes; example: one of them.
        aggregate: whether it needs an aggregate: mean, or p50 to p99.9.
        load: whether it is measured under a load; such a limit may be relative to stable.
    """

    meaning: str
    unit: str
    limit: Literal["at_most", "at_least"]
    example: str
    aggregate: bool
    load: bool


RUNTIME_METRICS: Mapping[str, RuntimeMetric] = MappingProxyType(
    {
        "time_to_first_token_seconds": RuntimeMetric(
            "the time from a request to the first token of its response",
            "s", "at_most", "0.5", True, True,
        ),
        "inter_token_latency_seconds": RuntimeMetric(
            "the time between two tokens of a response",
            "s", "at_most", "0.05", True, True,
        ),
        "tokens_per_second": RuntimeMetric(
            "the number of generated tokens per second, over all requests in flight",
            "1/s", "at_least", "1000", False, True,
        ),
        "batch_invariance_nats": RuntimeMetric(
            "the largest difference of a logprob between a text scored alone and in a batch; "
            "0 is bit for bit",
            "nat", "at_most", "0", False, False,
        ),
        DRAFT_ACCEPTANCE: RuntimeMetric(
            "the share of the draft tokens of speculative decoding that the target accepts, "
            "counted by a trainer's engine during a step, or by the infer kernel of a check",
            "", "at_least", "0.5", False, False,
        ),
    }
)  # fmt: skip
DIVERGENCES.reserve(*RUNTIME_METRICS)


def runtime(path: Path, section: Section, contract: Contract, clause: Clause) -> Iterator[Finding]:
    metric = RUNTIME_METRICS[clause.metric]
    if section != "runtime":
        message = f"{clause.metric} is a matter of runtime, not of {section}"
        yield Finding((*path, "metric"), message, "move the clause to runtime.clauses")
        return
    yield from _aggregate(path, clause, metric)
    if clause.clip is not None:
        yield Finding((*path, "clip"), f"{clause.metric} takes no clip", "remove it", key=True)
    if metric.load and clause.load is None:
        message = f"clause {clause.id!r} says no load: the same server is fast when idle"
        yield Finding(path, message, "add load: {concurrency: 8}")
    elif not metric.load and clause.load is not None:
        yield Finding((*path, "load"), f"{clause.metric} takes no load", "remove it", key=True)
    yield from _limit(path, contract, clause, metric)


def _aggregate(path: Path, clause: Clause, metric: RuntimeMetric) -> Iterator[Finding]:
    at = (*path, "aggregate")
    if not metric.aggregate:
        if clause.aggregate is not None:
            yield Finding(at, f"{clause.metric} takes no aggregate", "remove it", key=True)
    elif clause.aggregate is None:
        message = f"clause {clause.id!r} needs an aggregate"
        yield Finding(path, message, "add aggregate: p95, or mean")
    elif clause.aggregate == "max":
        message = "the longest wait of all cannot be promised: the next may be longer"
        yield Finding(at, message, "write p99.9, p95 or mean")
    elif clause.percentile is not None and not 50 <= clause.percentile <= 99.9:
        message = f"{clause.aggregate} of {clause.metric} cannot be judged"
        yield Finding(at, message, "write a percentile from p50 to p99.9")


def _limit(
    path: Path, contract: Contract, clause: Clause, metric: RuntimeMetric
) -> Iterator[Finding]:
    other = "at_least" if metric.limit == "at_most" else "at_most"
    if getattr(clause, other) is not None:
        message = f"{clause.metric} takes {metric.limit}"
        has = getattr(clause, metric.limit) is not None
        hint = f"remove {other}" if has else f"write {metric.limit}"
        yield Finding((*path, other), message, hint, key=True)
        return
    limit = getattr(clause, metric.limit)
    at = (*path, metric.limit)
    if limit is None:
        message = f"clause {clause.id!r} has no limit"
        yield Finding(path, message, f"add {metric.limit}: {metric.example}")
    elif isinstance(limit, Relative):
        yield from _relative(at, contract, clause, metric, limit)
    elif clause.metric == DRAFT_ACCEPTANCE and limit >= 1:
        message = f"{clause.metric} is a share, and found a limit of {limit:g}"
        yield Finding(at, message, f"write a share below 1, such as {metric.example}")
    elif limit < 0:
        message = f"{clause.metric} is never negative, found a limit of {limit:g}"
        yield Finding(at, message, "write a limit above 0")
    elif limit == 0 and metric.limit == "at_least":
        message = f"{clause.metric} is always at least 0: the clause can never fail"
        yield Finding(at, message, "write a limit above 0")
    elif limit == 0 and metric.load:
        message = f"{clause.metric} is never 0: the clause can never hold"
        yield Finding(at, message, "write a limit above 0")


def _relative(
    at: Path, contract: Contract, clause: Clause, metric: RuntimeMetric, limit: Relative
) -> Iterator[Finding]:
    if not metric.load:
        message = f"{clause.metric} has nothing to be relative to"
        yield Finding(at, message, f"write a number, such as {metric.example}")
    elif limit.of != "stable":
        message = f"{clause.metric} has no noise floor to be relative to"
        yield Finding((*at, "of"), message, "write of: stable")
    elif contract.stable is None:
        message = "the limit is relative to stable, and there is no stable: kernel"
        yield Finding(at, message, "declare stable:, or write a number")


def envelope(contract: Contract) -> Iterator[Finding]:
    """Check that the envelope's intervals are not empty, and that both kernels run inside it."""
    if contract.runtime.envelope is None:
        return
    envelope, at = contract.runtime.envelope, ("runtime", "envelope")
    for name in ("batch_size", "prompt_tokens"):
        low, high = getattr(envelope, name) or (0, 0)
        if low > high:
            message = f"the envelope's {name} is empty: {low:g} is more than {high:g}"
            yield Finding((*at, name), message, f"write [{high:g}, {low:g}]")
    low, high = envelope.batch_size or (0, 0)
    if envelope.batch_size is not None and low <= high:
        yield from _batches(contract, low, high)
    yield from _path(contract)
    written = "outside" in envelope.model_fields_set
    if written and envelope.outside == "stable" and contract.stable is None:
        message = "what lies outside the envelope goes to stable, and there is no stable: kernel"
        yield Finding((*at, "outside"), message, "declare stable:, or write outside: refuse")


def _batches(contract: Contract, low: float, high: float) -> Iterator[Finding]:
    for side, kernel in (("train", contract.kernels.train), ("infer", contract.kernels.infer)):
        if not low <= kernel.batch_size <= high:
            message = f"{side} runs in batches of {kernel.batch_size}, outside the envelope "
            message += f"[{low:g}, {high:g}] that the contract concerns"
            hint = "give the kernel a batch_size inside, or widen runtime.envelope.batch_size"
            yield Finding(("kernels", side, "batch_size"), message, hint)


def _path(contract: Contract) -> Iterator[Finding]:
    """Law 7: scoring a prompt (prefill) and generating (decode) run different code."""
    envelope = contract.runtime.envelope
    if envelope is None or envelope.path != "decode":
        return
    why = "and the envelope promises decode: scoring a prompt does not certify decoding"
    hint = "write path: decode, or promise prefill in runtime.envelope.path"
    if contract.kernels.infer.path == "prefill":
        yield Finding(("kernels", "infer", "path"), f"infer runs by prefill, {why}", hint)
    if contract.golden is not None and contract.golden.path == "prefill":
        yield Finding(("golden", "path"), f"golden texts are prefilled, {why}", hint)
