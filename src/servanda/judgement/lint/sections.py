# Lint of the sections besides clauses: the declared slices (known fields, conditions that some
# token can meet), a trainer's declarations, the runtime, and the escalation.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from servanda.contract.actions import ACTIONS
from servanda.contract.clause import (
    CALIBRATE_TREND,
    SECTIONS,
    WHOLE,
    Clause,
    Relative,
    Section,
    SliceRule,
)
from servanda.contract.finding import Finding, Path
from servanda.contract.model import EXTERNAL, Contract
from servanda.contract.objective import Reward, Weighting
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE
from servanda.judgement.clauses.scope import known_by_name, slices_of
from servanda.judgement.rewards import REWARDS, file_and_function
from servanda.judgement.slices.rules import FIELDS, LABEL, MOVED, OPERATORS, Field, field_of
from servanda.registry import did_you_mean, quoted
from servanda.theory.divergence.base import DIVERGENCES

_ANY_NUMBER = Field("context", "")  # placeholder for an unknown field


def slices(contract: Contract) -> Iterator[Finding]:
    """Check that each slice has a unique name and one definition."""
    seen: set[str] = set()
    for i, rule in enumerate(contract.slices):
        path = ("slices", i)
        if rule.name == WHOLE:
            message = "the slice 'all' is always there"
            yield Finding((*path, "name"), message, "remove it, or give it another name")
        elif rule.name in seen:
            message = f"two slices are named {rule.name!r}"
            yield Finding((*path, "name"), message, "give each slice its own name")
        seen.add(rule.name)
        if (rule.split is None) == (rule.match is None):
            both = "both split and match" if rule.split is not None else "neither split nor match"
            message = f"slice {rule.name!r} has {both}"
            hint = "split makes a slice of each value, match makes one slice: write one of them"
            yield Finding(path, message, hint)
        yield from _split(path, rule)
        yield from _match(path, rule.match or {})


def field(path: Path, name: str, *, key: bool) -> Iterator[Finding]:
    """Check that tokens can be sliced by a field."""
    if name in MOVED:
        message = f"{name} is known only once the answer is trained on, and so is an outcome"
        hint = f"write {MOVED[name]}, and promise tv_contribution there instead of tv"
        yield Finding(path, message, hint, key=key)
    elif field_of(name) is None:
        hint = did_you_mean(name, [*FIELDS, "labels.<name>"])
        yield Finding(path, f"no field is named {quoted(name)}", hint, key=key)


def _split(path: Path, rule: SliceRule) -> Iterator[Finding]:
    if rule.split is not None:
        yield from field((*path, "split"), rule.split, key=False)
        if rule.split in FIELDS and not FIELDS[rule.split].is_text and rule.at is None:
            message = f"a split of {rule.split} needs the edges of its buckets"
            yield Finding((*path, "split"), message, "add at: [8, 16]")
    if rule.at is None:
        return
    at = (*path, "at")
    if rule.split is None:
        yield Finding(at, "at gives the edges of a split, and there is no split", "remove at")
    elif (split := field_of(rule.split)) is not None and split.is_text:
        message = f"{rule.split} is split by its values, it has no edges"
        few = "remove at; most: 8 bounds how many values get a slice"
        yield Finding(at, message, few if rule.split.startswith(LABEL) else "remove at")
    if not rule.at or list(rule.at) != sorted(set(rule.at)):
        message = "the edges of a split increase, and there is at least one"
        yield Finding(at, message, "write them in order, such as [8, 16]")


def _match(path: Path, match: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name, conditions in match.items():
        here = (*path, "match", name)
        yield from field(here, name, key=True)
        if not conditions:
            yield Finding(
                here, f"{quoted(name)} has no condition", "write {gte: 3.0} or {in: [math]}"
            )
        sliced = field_of(name) or _ANY_NUMBER
        right = True
        for operator, value in conditions.items():
            for finding in _condition((*here, operator), operator, value, sliced):
                right = False
                yield finding
        if conditions and right and _is_empty(conditions):
            yield Finding(
                here,
                f"no {name} can meet this condition",
                "the lower end has to lie below the upper",
            )


def _condition(path: Path, operator: str, value: Any, sliced: Field) -> Iterator[Finding]:
    texts = list(sliced.values or ("math", "code"))
    written = f"[{', '.join(texts[:2])}]"
    if operator not in OPERATORS:
        message = f"no operator is named {quoted(operator)}"
        yield Finding(path, message, did_you_mean(operator, OPERATORS), key=True)
    elif operator == "exists":
        if not isinstance(value, bool):
            yield Finding(path, "exists takes true or false", "write {exists: true}")
    elif operator == "in":
        right = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        fits = (lambda v: isinstance(v, str)) if sliced.is_text else is_number
        if not right or not all(map(fits, value)):
            kind, hint = ("texts", written) if sliced.is_text else ("numbers", "[0, 1]")
            yield Finding(path, f"in takes a list of {kind}", f"write {{in: {hint}}}")
            return
        for j, name in enumerate(value):
            if sliced.values and name not in sliced.values:
                message = f"no {path[-2]} is {quoted(name)}"
                yield Finding((*path, j), message, did_you_mean(name, sliced.values))
    elif sliced.is_text:
        what = "a class" if sliced.values else "a label"
        message = f"{what} is a text, {operator} compares numbers"
        yield Finding(path, message, f"write {{in: {written}}} or {{exists: true}}", key=True)
    elif not is_number(value):
        yield Finding(path, f"{operator} takes a number", f"write {{{operator}: 3.0}}")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_empty(conditions: Mapping[str, Any]) -> bool:
    low = max((conditions[op] for op in ("gte", "gt") if op in conditions), default=-math.inf)
    high = min((conditions[op] for op in ("lte", "lt") if op in conditions), default=math.inf)
    closed = conditions.get("gt") != low and conditions.get("lt") != high
    return low > high or (low == high and not closed)


# A trainer's declarations: empty ranges, and weightings that cut valid tokens.
#
# A clip range is two distances from 1; a range around 1 is detected.  A trend has a reference,
# and a trainer's steps to compare with it.

_AT = ("gradient", "weighting")


def learning(contract: Contract) -> Iterator[Finding]:
    """Check the reward, the clip range, and the weighting of the gradient."""
    if contract.reward is not None:
        yield from _reward(contract.reward)
    if contract.gradient is not None and contract.gradient.clip_range is not None:
        low, high = contract.gradient.clip_range
        at = ("gradient", "clip_range")
        if low <= 0 or high <= 0:
            message = f"a clip range of [{low:g}, {high:g}] has no width on one side of 1"
            yield Finding(at, message, "write both distances from 1, such as [0.2, 0.28]")
        elif 0.5 <= low < 1 < high < 2:
            message = "clip_range holds distances from 1, and "
            message += f"[{low:g}, {high:g}] is a range around it"
            yield Finding(at, message, f"did you mean [{1 - low:.4g}, {high - 1:.4g}]?")
    weighting = contract.gradient.weighting if contract.gradient is not None else None
    if not isinstance(weighting, Weighting):
        return
    given = weighting.given
    if len(given) != 1:
        message = f"a gradient has one weighting, found {', '.join(given) or 'none'}"
        yield Finding(_AT, message, "write {tis: 2.0}, or naive")
    for name, bounds in given.items():
        if not isinstance(bounds, tuple):
            continue
        low, high = bounds
        if low >= high:
            message = f"the band of {name} is empty: {low:g} is not below {high:g}"
            yield Finding((*_AT, name), message, "write [low, high], such as [0.5, 2.0]")
        elif not low <= 1 <= high:
            message = f"the band of {name} leaves out 1, the ratio of two kernels that agree"
            yield Finding((*_AT, name), message, "write [low, high], such as [0.5, 2.0]")


def _reward(reward: Reward) -> Iterator[Finding]:
    """Check for a valid range, and a reward that is known or in a file."""
    if reward.range[0] >= reward.range[1]:
        yield Finding(("reward", "range"), "the range of the reward is empty", "write [low, high]")
    if reward.of is None or reward.of in REWARDS:
        return
    parts = file_and_function(reward.of)
    if parts is None:
        near = did_you_mean(reward.of, REWARDS)
        near += "" if near.endswith("?") else "."
        hint = f"{near} A reward of your own is rewards.py:score"
        yield Finding(("reward", "of"), f"no reward is named {quoted(reward.of)}", hint)
    elif not parts[0].endswith(".py") or not parts[1].isidentifier():
        message = f"{quoted(reward.of)} is no function in a Python file"
        hint = "write FILE.py:FUNCTION, such as rewards.py:score"
        yield Finding(("reward", "of"), message, hint)


def trend(contract: Contract) -> Iterator[Finding]:
    """Check that a trend can be judged."""
    clause, kernels = contract.trend, contract.kernels
    if clause is None:
        return
    if not clause.reference:
        yield Finding(("trend",), "trend names no reference of good runs", CALIBRATE_TREND)
    if {kernels.train.engine, kernels.infer.engine} != {EXTERNAL}:
        message = "trend is judged over the steps of a trainer, and servanda runs these kernels"
        hint = "write engine: external for both kernels, or leave trend out"
        yield Finding(("trend",), message, hint, key=True)
    for i, rule in enumerate(contract.escalation):
        masks = "trend" in (rule.when.get("clause"), rule.when.get("section")) and "mask" in rule.do
        if masks:
            message = "trend is about all tokens of a step, and mask leaves out a slice"
            yield Finding(("escalation", i, "do"), message, "write halt, correct or {page: oncall}")
    for _, place, other in contract.clauses():
        if other.id == "trend":
            yield Finding((*place, "id"), "trend is the name of the contract's trend", "rename it")


# The runtime: clauses about time, speed and batching, and the envelope.


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


# The escalation: the condition and the actions of each rule.

SUBJECTS = ("clause", "section", "diverted_traffic")
STATES = ("violated", "holds", "inconclusive", "error")
BARE = tuple(name for name, action in ACTIONS.items() if not action.example)
WITH_VALUE = {name: action.example for name, action in ACTIONS.items() if action.example}
COMPARISONS = OPERATORS[:4]


def escalation(contract: Contract) -> Iterator[Finding]:
    """Every rule names something that exists, and an action that can be taken."""
    ids = {clause.id for _, _, clause in contract.clauses()}
    ids |= {"trend"} if contract.trend is not None else set()
    for i, rule in enumerate(contract.escalation):
        yield from _when(("escalation", i, "when"), rule.when, ids)
        for j, action in enumerate(rule.do):
            path = ("escalation", i, "do", j)
            yield from _do(path, action, stable=contract.stable is not None)
            yield from _in_a_trainer(path, contract, action)
            if isinstance(action, Mapping) and action.get("divert") == "slice":
                yield from _routable((*path, "divert"), contract, rule.when)


def _when(path: Path, when: Mapping[str, Any], ids: set[str]) -> Iterator[Finding]:
    known = (*SUBJECTS, "is", "is_not")
    for name in when:
        if name not in known:
            message = f"when has no key {quoted(name)}"
            yield Finding((*path, name), message, did_you_mean(name, known), key=True)
    subjects = [name for name in SUBJECTS if name in when]
    if len(subjects) != 1:
        if len(subjects) > 1 or set(when) <= set(known):
            message = f"when watches one thing: {', '.join(SUBJECTS)}"
            yield Finding(path, message, "write {clause: tail, is: violated}")
        return
    subject = subjects[0]
    states = [name for name in ("is", "is_not") if name in when]
    if subject == "diverted_traffic":
        yield from _traffic((*path, subject), when[subject])
        if states:
            message = "diverted_traffic has no state"
            yield Finding((*path, states[0]), message, "write {diverted_traffic: {gte: 0.3}}", True)
        return
    names = ids if subject == "clause" else SECTIONS
    if not isinstance(when[subject], str) or when[subject] not in names:
        message = f"no {subject} is named {quoted(when[subject])}"
        hint = did_you_mean(when[subject], names) if names else "declare a clause"
        yield Finding((*path, subject), message, hint)
    if len(states) != 1 and set(when) <= set(known):
        yield Finding(
            path, "when needs one of is and is_not", f"write {{{subject}: ..., is: violated}}"
        )
    for name in states:
        if when[name] not in STATES:
            message = f"{name} cannot be {quoted(when[name])}"
            yield Finding((*path, name), message, did_you_mean(when[name], STATES))


def _traffic(path: Path, value: Any) -> Iterator[Finding]:
    right = isinstance(value, Mapping) and len(value) > 0 and set(value) <= set(COMPARISONS)
    if not right or not all(is_number(v) and 0 <= v <= 1 for v in value.values()):
        message = "diverted_traffic is compared with a share between 0 and 1"
        yield Finding(path, message, "write {gte: 0.3}")


def _do(path: Path, action: str | Mapping[str, Any], *, stable: bool) -> Iterator[Finding]:
    if isinstance(action, Mapping) and len(action) != 1:
        message = f"an action is one name with its value, found {len(action)}"
        yield Finding(path, message, "write each action as an item of its own")
        return
    name = action if isinstance(action, str) else next(iter(action))
    value = None if isinstance(action, str) else action[name]
    known = (*BARE, *WITH_VALUE)
    at = path if isinstance(action, str) else (*path, name)
    if name not in known:
        yield Finding(at, f"no action is named {quoted(name)}", did_you_mean(name, known), True)
    elif name in BARE and not isinstance(action, str):
        yield Finding(at, f"{name} takes no value", f"write it as {name}", True)
    elif name in WITH_VALUE and not _fits(name, value):
        wanted = {"divert": "slice or all", "page": "the name of whom to page"}
        message = f"{name} takes {wanted.get(name, 'a share above 0 and at most 1')}"
        yield Finding(at, message, f"write {{{name}: {WITH_VALUE[name]}}}")
    elif name == "divert" and not stable:
        message = "divert sends traffic to stable, and there is no stable: kernel"
        hint = "declare stable: with the kernel that serves when infer may not, or hold instead"
        yield Finding(at, message, hint, True)


def _in_a_trainer(
    path: Path, contract: Contract, action: str | Mapping[str, Any]
) -> Iterator[Finding]:
    """If a trainer runs both kernels, it takes the actions, not a gateway."""
    name = action if isinstance(action, str) else next(iter(action), "")
    kernels = contract.kernels
    if name not in ACTIONS or EXTERNAL not in (kernels.train.engine, kernels.infer.engine):
        return
    at = path if isinstance(action, str) else (*path, name)
    doors = ACTIONS[name].doors
    if "rl" not in doors:
        *some, last = (n for n, known in ACTIONS.items() if "rl" in known.doors)
        message = f"{name} is taken by {' and '.join(doors)}, and a trainer runs these kernels"
        yield Finding(at, message, f"a trainer takes {', '.join(some)} and {last}", key=True)
    weighting = contract.gradient.weighting if contract.gradient else None
    if name == "correct" and weighting is None:
        message = "correct weighs tokens by gradient.weighting, and none is declared"
        yield Finding(at, message, "declare gradient: {weighting: {tis: 2.0}}", key=True)


def _routable(path: Path, contract: Contract, when: Mapping[str, Any]) -> Iterator[Finding]:
    """A slice can be diverted only if it is known before the request."""
    known = known_by_name(contract)
    for subject in ("clause", "section"):
        watched = [
            (clause, slices_of(contract, section, clause))
            for section, _, clause in contract.clauses()
            if when.get(subject) == (clause.id if subject == "clause" else section)
        ]
        named = [name for clause, _ in watched for name in clause.slices or ()]
        late = [name for name in named if known.get(name, "request") != "request"]
        spoken = [name for _, names in watched for name in names]
        if subject == "clause" and late:
            message = f"slice {late[0]!r} of clause {watched[0][0].id!r} is not known before the "
            message += "request, so no request can be diverted for it"
        elif spoken and all(known.get(name, "request") != "request" for name in spoken):
            message = f"no slice of {subject} {when[subject]!r} is known before the request, "
            message += "so no request can be diverted for it"
        else:
            continue
        hint = "divert: all, or watch a clause on slices of request.* and labels.*"
        yield Finding(path, message, hint, key=True)


def _fits(name: str, value: Any) -> bool:
    if name == "divert":
        return value in ("slice", "all")
    if name == "page":
        return isinstance(value, str) and bool(value.strip())
    return is_number(value) and 0 < value <= 1
