# Lint of the clauses: a metric in its section, and a limit that can both hold and fail.

from __future__ import annotations

import math
from collections.abc import Iterator

from servanda.clauses import CALIBRATION, GUARDS, TIMINGS
from servanda.clauses.timing import load_data
from servanda.contract import WHOLE, Clause, Contract, Relative, Section
from servanda.divergence import DIVERGENCES, Divergence, Span
from servanda.lint.calibration import calibration
from servanda.lint.finding import Finding, nearest, quoted
from servanda.marks import Marks, Path

KNOWN_LATER = (
    "reward_drift",
    "reward_gap",
    "weight_gap",
    "policy_gradient_bias",
    "ratio_budget",
    "support_mass",
    "rescored_ratio",
    "coherence",
)
_LOAD = ("concurrency", "new_tokens", "prompt_tokens")
_RUNTIME = (*TIMINGS, "batch_invariance_nats")
_AN_EXAMPLE = "{id: tv, metric: tv, aggregate: mean, at_most: 0.02}"


def clauses(contract: Contract, marks: Marks) -> Iterator[Finding]:
    """Every clause, and that there is one."""
    first: dict[str, Path] = {}
    declared = {WHOLE, *(rule.name for rule in contract.slices)}
    known = [*DIVERGENCES, *GUARDS, CALIBRATION, *_RUNTIME, *KNOWN_LATER]
    for section, path, clause in contract.clauses():
        if clause.id in first:
            line = marks.near((*first[clause.id], "id")).line
            message = f"two clauses are named {clause.id!r}; the first is in line {line}"
            yield Finding((*path, "id"), message, "give it its own id: evidence is kept by id")
        first.setdefault(clause.id, path)
        if clause.slices == ():
            message = f"clause {clause.id!r} speaks of no slice"
            yield Finding((*path, "slices"), message, "remove slices: it then speaks of every one")
        for j, name in enumerate(clause.slices or ()):
            if name not in declared:
                message = f"no slice is named {quoted(name)}"
                yield Finding((*path, "slices", j), message, nearest(name, declared))
        yield from _stages(path, clause)
        if clause.metric in GUARDS:
            yield from _guard(path, section, clause)
        elif clause.metric in DIVERGENCES:
            yield from _divergence(path, section, clause)
            yield from _relative(path, contract, clause)
        elif clause.metric in _RUNTIME:
            yield from _runtime(path, section, clause)
            yield from _relative(path, contract, clause)
        elif clause.metric == CALIBRATION:
            yield from calibration(path, section, clause)
            yield from _relative(path, contract, clause)
        elif clause.metric in KNOWN_LATER:
            yield from _later(path, clause)
        else:
            message = f"no metric is named {quoted(clause.metric)}"
            yield Finding((*path, "metric"), message, nearest(clause.metric, known))
    if not first:
        message = "the contract promises nothing: it has no clause"
        yield Finding((), message, f"add one under statistical, such as {_AN_EXAMPLE}")


def _stages(path: Path, clause: Clause) -> Iterator[Finding]:
    if not clause.stages:
        message = f"clause {clause.id!r} is judged at no stage"
        yield Finding((*path, "stages"), message, "remove stages: a clause is judged at every one")
    for j, stage in enumerate(clause.stages):
        if stage in clause.stages[:j]:
            message = f"stage {stage!r} is listed twice"
            yield Finding((*path, "stages", j), message, "remove one")


def _guard(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    metric = clause.metric
    if section != "observability":
        message = f"{metric} is a guard, a precondition of the promises in {section}"
        yield Finding((*path, "metric"), message, "move the clause to observability.clauses")
        return
    for name in ("aggregate", "clip"):
        if getattr(clause, name) is not None:
            yield Finding((*path, name), f"{metric} takes no {name}", "remove it", key=True)
    if metric == "sampler_fidelity":
        for name in ("at_most", "at_least"):
            if getattr(clause, name) is not None:
                hint = "remove it: the guard rejects at the confidence of the contract"
                yield Finding((*path, name), "sampler_fidelity takes no limit", hint, key=True)
        return
    if clause.at_most is not None:
        hint = "write at_least: 0.999"
        yield Finding((*path, "at_most"), "usable_ratio takes at_least", hint, key=True)
        return
    least = clause.at_least
    if least is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", "add at_least: 0.999")
    elif isinstance(least, Relative):
        message = "usable_ratio has nothing to be relative to"
        yield Finding((*path, "at_least"), message, "write a number, such as 0.999")
    elif least > 1:
        message = f"usable_ratio is at most 1: it can never be at least {least:g}"
        yield Finding((*path, "at_least"), message, "write a share, such as 0.999")
    elif least <= 0:
        message = f"usable_ratio is always at least {least:g}: the clause can never fail"
        yield Finding((*path, "at_least"), message, "write a share, such as 0.999")


def _divergence(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    metric = DIVERGENCES[clause.metric]
    if section not in ("numerical", "statistical"):
        message = f"{metric.name} compares the kernels' tokens; it is no matter of {section}"
        yield Finding((*path, "metric"), message, "move the clause to statistical")
        return
    if section == "numerical" and "logits" not in metric.forms:
        message = f"{metric.name} has no form on full logits, which numerical judges"
        yield Finding((*path, "metric"), message, "move the clause to statistical")
    elif section == "statistical" and not {"logprob", "top1"} & set(metric.forms):
        message = f"{metric.name} needs full logits; a sampled token has none"
        hint = "move the clause to numerical: golden texts are scored with full logits"
        yield Finding((*path, "metric"), message, hint)
        return
    yield from _aggregate(path, section, clause, metric)
    yield from _limit(path, section, clause, metric)


def _aggregate(
    path: Path, section: Section, clause: Clause, metric: Divergence
) -> Iterator[Finding]:
    """How the values of many tokens become one number, and what clip does to it."""
    aggregate = clause.aggregate or ("max" if section == "numerical" else None)
    if aggregate is None:
        of = "mean, or p99" if metric.bounded else "p99, or mean with clip: 1.0"
        yield Finding(path, f"clause {clause.id!r} needs an aggregate", f"add aggregate: {of}")
        return
    if section == "statistical" and aggregate == "max":
        message = "a sample cannot certify a maximum: the next token may exceed it"
        hint = "write p99.9, or move the clause to numerical, which looks at every golden token"
        yield Finding((*path, "aggregate"), message, hint)
        return
    if clause.clip is not None and (aggregate != "mean" or metric.bounded):
        message = f"clip bounds a mean; {aggregate} does not need it"
        if metric.bounded:
            message = f"{metric.name} is bounded: there is nothing to clip"
        yield Finding((*path, "clip"), message, "remove clip", key=True)
    unbounded = aggregate == "mean" and not metric.bounded and clause.clip is None
    if section == "statistical" and aggregate == "mean" and metric.span[0] == -math.inf:
        message = f"{metric.name} has no smallest value, so no sample can certify its mean"
        hint = "promise aggregate: p99, or the mean of a metric that is never negative (k3_nats)"
        yield Finding((*path, "aggregate"), message, hint)
    elif section == "statistical" and unbounded and clause.mode == "enforce":
        message = f"the mean of {metric.name} has no bound, so no sample can certify it"
        hint = "add clip: 1.0, or promise aggregate: p99; mode: monitor shows it as an estimate"
        yield Finding((*path, "aggregate"), message, hint)


def _limit(path: Path, section: Section, clause: Clause, metric: Divergence) -> Iterator[Finding]:
    """At most, once, and neither never nor always exceeded."""
    if clause.at_least is not None:
        message = f"a divergence is kept small: {metric.name} takes at_most"
        hint = "remove at_least" if clause.at_most is not None else "write at_most"
        yield Finding((*path, "at_least"), message, hint, key=True)
        return
    limit = clause.at_most
    if limit is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", "add at_most: 0.02")
        return
    if isinstance(limit, Relative):
        return
    at = (*path, "at_most")
    clipped = clause.clip is not None and clause.aggregate == "mean" and not metric.bounded
    low, top = _span(section, clause, metric)
    top = clause.clip if clipped and clause.clip is not None else top
    if low == 0 and limit < 0:
        message = f"{metric.name} is never negative: a limit of {limit:g} can never hold"
        yield Finding(at, message, "write a limit above 0")
    elif limit < low:
        message = f"{metric.name} is at least {low:g}: a limit of {limit:g} can never hold"
        yield Finding(at, message, f"write a limit above {low:g}")
    elif limit >= top:
        cut = " after clip" if clipped else ""
        message = f"{metric.name} is at most {top:g}{cut}: a limit of {limit:g} can never fail"
        yield Finding(
            at, message, f"write a limit below {top:g}" + (", or raise clip" if cut else "")
        )
    elif limit == low == 0 and section == "statistical" and clause.percentile is None:
        message = "a sample cannot certify 0"
        hint = "move the clause to numerical: on golden texts every position is looked at"
        yield Finding(at, message, hint)


def _span(section: Section, clause: Clause, metric: Divergence) -> Span:
    """Where the number that is held to the limit can lie."""
    # the mean of the sampled values is the exact one, which may lie closer together
    exact = section == "numerical" or clause.aggregate == "mean"
    return metric.span_of("logits") if exact and "logits" in metric.forms else metric.span


def _relative(path: Path, contract: Contract, clause: Clause) -> Iterator[Finding]:
    limit = clause.at_most
    if isinstance(limit, Relative) and limit.of == "stable" and contract.stable is None:
        message = "the limit is relative to stable, and there is no stable: kernel"
        yield Finding((*path, "at_most"), message, "declare stable:, or write of: self_noise")


def _runtime(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    """A promise about time, speed or batching: its section, its load, its one limit."""
    if section != "runtime":
        message = f"{clause.metric} is a matter of runtime, not of {section}"
        yield Finding((*path, "metric"), message, "move the clause to runtime.clauses")
        return
    wanted, other = "at_most", "at_least"
    if clause.metric == "tokens_per_second":
        wanted, other = other, wanted
    if getattr(clause, wanted) is None or getattr(clause, other) is not None:
        yield Finding(path, f"{clause.metric} takes {wanted}, and nothing else", f"write {wanted}")
    limit = getattr(clause, wanted)
    if isinstance(limit, Relative) and (limit.of != "stable" or clause.metric not in TIMINGS):
        message = f"{clause.metric} has no {limit.of} to be relative to"
        yield Finding((*path, wanted), message, "write a number")
    waits = clause.metric.endswith("_seconds")
    if (waits and clause.aggregate in (None, "max")) or (
        not waits and clause.aggregate is not None
    ):
        message = f"{clause.metric} takes {'mean, or pN such as p95' if waits else 'no aggregate'}"
        yield Finding(path, message, "write aggregate: p95" if waits else "remove aggregate")
    load = load_data(clause)
    if clause.metric in TIMINGS and "concurrency" not in load:
        message = f"clause {clause.id!r} says no load: the same server is fast when idle"
        yield Finding(path, message, "add load: {concurrency: 8}")
    for name, n in load.items():
        if name not in _LOAD or (n is not None and (type(n) is not int or n < 1)):
            message = f"a load has {', '.join(_LOAD)}, whole numbers >= 1; found {name}: {n}"
            yield Finding((*path, "load", name), message, "write load: {concurrency: 8}")


def _later(path: Path, clause: Clause) -> Iterator[Finding]:
    """Known by name, not judged yet: only what is wrong in any version."""
    if clause.at_most is not None and clause.at_least is not None:
        message = f"clause {clause.id!r} has both at_most and at_least"
        yield Finding((*path, "at_least"), message, "keep one of them", key=True)
    for name in ("at_most", "at_least"):
        limit = getattr(clause, name)
        if isinstance(limit, float) and limit < 0:
            message = f"{clause.metric} is never negative, found a limit of {limit:g}"
            yield Finding((*path, name), message, "write a limit above 0")
