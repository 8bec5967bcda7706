# The difference of two contracts, for one side, and the version number that it requires.

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from servanda.authoring.diff import directions
from servanda.authoring.diff.directions import (
    NEVER,
    Custom,
    Handling,
    Items,
    Part,
    Rule,
    With,
    as_text,
    cosmetic,
    higher,
    inclusion,
    lower,
    other,
    ranked,
    wider,
)
from servanda.authoring.diff.values import KINDS, MIRROR, Change, Pair, Side, clause_text, flow_text
from servanda.contract import clause, model, objective, policy, workload
from servanda.contract.model import Clause, Contract, Place
from servanda.contract.policy import Escalation
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.clauses.scope import slices_of
from servanda.theory.sampling import Sampling

# The comparison of two contracts, field by field, with the meaning of each difference.


# The rule of each field of the language; a test checks it against the models.
#
# Fields outside the contract's digest that only define places or display names are cosmetic. Fields
# in the digest without a tighter direction are retargeted: other evidence is needed, and neither
# version implies the other.


Fields = Mapping[str, Handling]

_WHERE_IT_RUNS = "the place where a kernel runs does not change its results"
_ONE_KERNEL = "all servers of a pool run the same kernel"
_OTHER_KERNEL = "it computes different numbers"
_OTHER_DRAWS = "the tokens are sampled from another distribution"
_RE_ROLL = "different random samples; picking among them would be uncorrected multiple testing"
_FOR_PEOPLE = "it is for people"
_NAME = other("the part is identified by it", says="removed, and added")

_KERNEL: Fields = {
    "engine": other(_OTHER_KERNEL),
    "model": other("another file may hold other weights; evidence is keyed by their digest too"),
    "adapter": other("another adapter has other weights; evidence is keyed by their digest too"),
    "url": cosmetic(_WHERE_IT_RUNS),
    "served": other("a server may have several models"),
    "dialect": other("another kind of server"),
    "logprobs": other("logprobs before and after the sampling are not the same numbers"),
    "sampling_defaults": cosmetic("each row of traffic says what it was sampled with"),
    "timeout_s": cosmetic(_WHERE_IT_RUNS),
    "key_env": cosmetic(_WHERE_IT_RUNS),
    "python": cosmetic(_WHERE_IT_RUNS),
    "title": cosmetic(_FOR_PEOPLE),
    "dtype": other(_OTHER_KERNEL),
    "attention": other(_OTHER_KERNEL),
    "device": other("another processor rounds otherwise"),
    "quantization": other(_OTHER_KERNEL),
    "head_dtype": other("logits are rounded otherwise"),
    "path": other(_OTHER_KERNEL),
    "batch_size": other("rounding depends on what runs together"),
    "prefill_chunk": other("rounding depends on what runs together"),
    "prefix_cache": other("a cached prefix is read, and not computed"),
    "kv_cache": other("keys and values are rounded otherwise"),
    "options": other("the engine runs with other arguments"),
    "sampling": Part("train's own transform; without it, the workload's"),
    "mask": other(_OTHER_DRAWS),
    "routes": other(_OTHER_KERNEL),
    "weights_from": other("other weights"),
    "fault": other(_OTHER_KERNEL),
}
_SAMPLING: Fields = {
    "temperature": other(_OTHER_DRAWS),
    "top_k": other(_OTHER_DRAWS),
    "top_p": other(_OTHER_DRAWS),
    "min_p": other(_OTHER_DRAWS),
}
_WORKLOAD: Fields = {
    "source": other("other tokens"),
    "prompts": other("another file may hold other texts; evidence is keyed by their digest too"),
    "mode": other("tokens that the infer kernel samples, or tokens that are given"),
    "samples": other(_RE_ROLL),
    "sampling": Part(""),
    "round": other(_RE_ROLL),
}
_CLAUSE: Fields = {
    "id": _NAME,
    "metric": other("another quantity"),
    "aggregate": directions.AGGREGATE,
    "at_most": Part("", scalar=directions.LIMIT, none="tightened", says="lower is tightened"),
    "times_format": lower("a kernel that is as near to its format passes it too", absent=0.0),
    "at_least": Part("", scalar=directions.LIMIT, none="tightened", says="higher is tightened"),
    "clip": other("a mean of values with another cap is another quantity"),
    "severity": ranked("warning", "error", "critical", why="a warning fails nothing"),
    "mode": ranked("monitor", "enforce", why="a monitored clause fails nothing"),
    "slices": Custom("superset is tightened", "judged by itself in more places", directions.slices),
    "workload": Custom("retargeted", "judged on other texts", directions.workload),
    "stages": inclusion("judged at more stages"),
    "claim": Custom(
        "retargeted",
        "all tokens that such prompts generate, or only those that were measured",
        directions.claim,
    ),
    "required": ranked(
        False, True, why="a value that cannot be measured is an error, and is not skipped"
    ),
    "load": Part("the conditions in which a time is measured"),
    "over": other("another window of traffic"),
}
_STAGE: Fields = {
    "sequences": directions.SEQUENCES,
    "share": directions.SHARE,
    "sample": directions.SAMPLE,
    "steps": directions.STEPS,
    "dwell": higher("each step is watched for longer", absent=0.0, time=True),
    "approval": ranked("none", "required", why="a person has to agree"),
    "if_inconclusive": ranked(
        "wait",
        "hold",
        "roll_back",
        why="each later word takes more traffic from a kernel that is not shown to conform",
    ),
}
_CONTRACT: Fields = {
    "apiVersion": other("another language"),
    "kind": other("another document"),
    "metadata": Part(""),
    "kernels": Part(""),
    "stable": Part("the kernel that serves when infer may not; limits may be relative to it"),
    "weights": Part(""),
    "bitwise": ranked(True, False, why="columns that are equal in every bit are then no evidence"),
    "workload": Items(
        "the texts that promises are judged on",
        "workload",
        says="item by item, by name; added, removed; another first is retargeted",
        first="live traffic is the first, and so is the workload of a clause that names none",
    ),
    "workloads": With("workload", "a single one is one of several"),
    "golden": Part("the texts that numerical promises are judged on"),
    "labels": Items("labels cut live traffic", "label"),
    "slices": Items("a part of the tokens that is judged by itself", "slice"),
    "confidence": higher("a wrong answer is less likely"),
    "claim": other("all tokens that such prompts generate, or only those that were measured"),
    "reward": Part("the reward whose drift is bounded"),
    "gradient": Part("the gradient whose bias is bounded"),
    "numerical": Items("a promise", "clause", says="by `id`, through all sections; added, removed"),
    "statistical": With("numerical", ""),
    "runtime": Part(""),
    "observability": Part(""),
    "trend": Part("whether the gap has changed is one more question"),
    "escalation": Items(
        "the actions that follow from a verdict", "rule", says="by `when`; added, removed"
    ),
    "routing": Part(""),
    "promotion": Part(""),
}

RULES: Mapping[type[BaseModel], Fields] = MappingProxyType(
    {
        model.Contract: _CONTRACT,
        model.Metadata: {
            "name": other("evidence and runs are kept by it"),
            "version": cosmetic(_FOR_PEOPLE),
            "title": cosmetic(_FOR_PEOPLE),
            "description": cosmetic(_FOR_PEOPLE),
            "annotations": cosmetic(_FOR_PEOPLE),
        },
        model.Kernels: {"train": Part(""), "infer": Part("")},
        model.Kernel: _KERNEL,
        Sampling: _SAMPLING,
        workload.WorkloadSampling: {
            **_SAMPLING,
            "max_new_tokens": other("longer answers are other tokens"),
            "seed": other(_RE_ROLL),
        },
        model.Weights: {
            "identity": ranked(
                None, "declared", "derived", "verified", why="a better proof of equal weights"
            ),
            "changes": other("one set of weights, or one per step"),
        },
        workload.Workload: _WORKLOAD,
        workload.NamedWorkload: {**_WORKLOAD, "name": _NAME},
        workload.Golden: {
            "prompts": _WORKLOAD["prompts"],
            "path": other("another program scores them"),
        },
        workload.LabelSource: {"source": other("traffic is cut by something else")},
        clause.Trend: {
            "reference": other("another file may hold other good runs; its digest tells"),
            "digest": other("other good runs"),
            "metrics": other("other quantities"),
            "severity": _CLAUSE["severity"],
            "mode": _CLAUSE["mode"],
        },
        clause.SliceRule: {
            "name": _NAME,
            "split": other("other tokens"),
            "match": other("other tokens"),
            "at": directions.EDGES,
            "most": directions.MOST,
        },
        objective.Reward: {
            "range": wider("the same bound, for more rewards"),
            "of": other("another reward"),
        },
        objective.Gradient: {
            "advantage": Part(
                "", scalar=higher("the same bias, times more"), says="higher is tightened"
            ),
            "score_norm": Part(
                "",
                scalar=higher("the same bias, times more"),
                says="higher is tightened; `logit_space` to or from a number is retargeted",
            ),
            "weighting": Part("", scalar=other("another estimator"), says="retargeted"),
            "loss": other("another estimator"),
            "clip_range": other("a share of another range"),
            "ratio": other("another estimator"),
        },
        objective.GroupAdvantage: {
            "group_size": higher("the largest advantage grows with the group"),
            "std": other("advantages of another scale"),
        },
        objective.Weighting: dict.fromkeys(
            objective.Weighting.model_fields, other("another estimator")
        ),
        model.Clause: _CLAUSE,
        clause.Relative: {
            "times": directions.LIMIT,
            "of": other("a multiple of something else"),
        },
        clause.Load: {
            "concurrency": directions.CONCURRENCY,
            "new_tokens": other("other requests"),
            "prompt_tokens": other("other requests"),
        },
        model.Runtime: {
            "envelope": Part("the conditions in which promises were shown, and who serves outside"),
            "clauses": With("numerical", ""),
        },
        model.Envelope: {
            "batch_size": wider("shown, and served, in more conditions"),
            "prompt_tokens": wider("shown, and served, in more conditions"),
            "path": other(_OTHER_KERNEL),
            "outside": ranked(
                "infer", ("stable", "refuse"), why="infer promises nothing of what lies outside"
            ),
        },
        model.Observability: {
            "record": inclusion("more of what happened can be looked at"),
            "clauses": With("numerical", ""),
        },
        policy.Escalation: {
            "when": _NAME,
            "do": directions.ACTIONS,
        },
        policy.Routing: {
            "mode": ranked(
                "observe", "enforce", why="infer serves all traffic, or failing slices leave infer"
            ),
            "share": lower("the infer kernel serves less of the healthy traffic"),
            "enter_evidence": lower("a slice is diverted on less evidence"),
            "leave_evidence": higher("a slice returns on more evidence"),
            "horizon": lower("a fault after a long good history is detected on less evidence"),
            "keys": lower("fewer users are enough to divert a slice"),
            "dwell": higher("a slice stays diverted for longer", time=True),
            "longest_dwell": higher(
                "a slice that fails repeatedly stays diverted for longer", time=True
            ),
            "moves_per_hour": lower("a flapping slice is left on stable sooner"),
            "most_diverted": higher("more of the traffic may be diverted"),
            "stable_in_flight": higher("stable can take more of the traffic", absent=0.0),
            "sample": higher("more of the infer kernel's responses are scored"),
            "sample_near": higher("more responses are scored where a decision is near"),
            "mirror": higher("more of a diverted slice is measured"),
            "budget": higher("the train kernel may score more"),
            "expires": lower("a route that is not renewed ends sooner", time=True),
            "without_snapshot": ranked(
                "infer",
                "stable",
                why="while no route is known, nothing shows that infer is within its limits",
            ),
            "replicas": Part("where the users of a pool are served"),
        },
        policy.Replicas: dict.fromkeys(policy.Replicas.model_fields, cosmetic(_ONE_KERNEL)),
        policy.Replica: dict.fromkeys(policy.Replica.model_fields, cosmetic(_ONE_KERNEL)),
        policy.Promotion: {
            "offline": Part(""),
            "shadow": Part("a stage before all traffic"),
            "canary": Part("a stage before all traffic"),
            "full": Part("the clauses that are watched once the infer kernel serves all traffic"),
            "valid_for": lower("evidence is renewed sooner", absent=NEVER, time=True),
        },
        policy.StageRule: _STAGE,
    }
)


_NAMES = {"id", "name"}  # identifying keys of items
_ONLY_RENAMED = "did it only change its name? evidence is kept by it"
_ANOTHER_KIND = "a number, or what follows from something else: neither keeps the other"
_THERE_ANYWAY = "a validity check that applies even if it is not written"
_ANOTHER_SECTION = "judged on other texts, by another procedure"


@dataclass(frozen=True)
class _Item:
    """An item of a list: its value, its index, and its place in changes."""

    value: BaseModel
    at: Place
    place: Place
    enforced: bool = True

    @property
    def content(self) -> str:
        """The item without its name; a clause of another section is a different one."""
        section = self.place[0] if isinstance(self.value, Clause) else ""
        return as_text([section, self.value.model_dump(exclude=_NAMES)])


def changes(old: Contract, new: Contract) -> tuple[Change, ...]:
    """The changes of a contract against an older one, in the order of the language.

    Files are not opened: contracts are compared as written.

    Returns:
        Empty for equal contracts; in reverse, tightened becomes loosened and added removed.

    >>> from servanda.contract.model import API_VERSION
    >>> kernel = {"engine": "table", "model": "q.json"}
    >>> def contract(limit):
    ...     tv = {"id": "tv", "metric": "tv", "aggregate": "mean", "at_most": limit}
    ...     return Contract.model_validate({
    ...         "apiVersion": API_VERSION, "kind": "KernelContract", "metadata": {"name": "x"},
    ...         "kernels": {"train": kernel, "infer": kernel}, "statistical": [tv],
    ...     })
    >>> [(c.kind, c.name, c.what) for c in changes(contract(0.02), contract(0.05))]
    [('loosened', 'statistical.tv.at_most', '0.02 -> 0.05')]
    """
    return tuple(_fields(Pair((old, new)), old, new))


def _fields(pair: Pair, old: BaseModel, new: BaseModel) -> Iterator[Change]:
    for name, rule in RULES[type(old)].items():
        key = type(old).model_fields[name].alias or name
        inner = pair.key(key, (old, new))
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(rule, Rule):
            yield from rule(inner, before, after)
        elif isinstance(rule, Custom):
            yield from rule.compare(inner, before, after, rule.why)
        elif isinstance(rule, Part):
            yield from _part(inner, rule, before, after)
        elif isinstance(rule, Items):
            yield from _items(inner, rule, *map(_FINDERS[name], inner.contracts))
        else:
            assert isinstance(rule, With)  # compared together with another field


def _part(pair: Pair, rule: Part, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, BaseModel) and type(old) is type(new):
        yield from _fields(pair, old, new)
    elif old is None or new is None:
        if old is new:
            return
        kind = rule.none if old is None else MIRROR[rule.none]
        if rule.scalar is None:
            yield pair.change(kind, flow_text(new if old is None else old), rule.why)
        else:
            names = (rule.scalar.absent if v is None else flow_text(v) for v in (old, new))
            yield pair.change(kind, " -> ".join(names), rule.scalar.why)
    elif type(old) is type(new) and rule.scalar is not None:
        yield from rule.scalar(pair, old, new)
    else:
        yield pair.change("retargeted", f"{flow_text(old)} -> {flow_text(new)}", _ANOTHER_KIND)


def _items(
    pair: Pair, rule: Items, old: Mapping[str, _Item], new: Mapping[str, _Item]
) -> Iterator[Change]:
    """Changes of common items, of items in one only, and of their order."""
    removed = {name: item for name, item in old.items() if name not in new}
    for name, item in new.items():
        if name in old:
            yield from _same(pair, old[name], item)
        else:
            before = next((n for n, was in removed.items() if was.content == item.content), None)
            if before is None:
                yield _alone(_spot(pair, None, item), rule, item, pair.contracts[0])
            else:
                there = _spot(pair, removed.pop(before), item)
                what = f"{before} -> {name} ({_ONLY_RENAMED})"
                yield there.change("retargeted", what, "all else is equal")
    for item in removed.values():
        yield _alone(_spot(pair, item, None), rule, item, pair.contracts[1])
    yield from _order(pair, rule, old, new)


def _spot(pair: Pair, old: _Item | None, new: _Item | None) -> Pair:
    """The pair of an item in both, or in only one."""
    item = new or old
    assert item is not None
    at = (old.at if old else None, new.at if new else None)
    enforced = ((old or item).enforced, (new or item).enforced)
    return replace(pair, place=item.place, at=at, enforced=enforced)


def _alone(there: Pair, rule: Items, item: _Item, other: Contract) -> Change:
    """An item that the other contract does not have."""
    if isinstance(item.value, Clause) and _unwritten(item.value, other):
        return there.change("cosmetic", _described(item), _THERE_ANYWAY)
    kind = "added" if there.at[0] is None else "removed"
    return there.change(kind, _described(item), rule.why)


def _unwritten(clause: Clause, contract: Contract) -> bool:
    """Whether a contract has a validity check that it does not write."""
    trained = any(w.source == "trainer" for w in contract.all_workloads.values())
    metrics = {c.metric for _, _, c in contract.clauses()}
    if not contract.statistical or trained or metrics & {clause.metric, "served_fidelity"}:
        return False
    written = clause.model_dump(exclude=_NAMES)
    return any(written == guard.model_dump(exclude=_NAMES) for guard in DEFAULT_GUARDS)


def _same(pair: Pair, old: _Item, new: _Item) -> Iterator[Change]:
    there = _spot(pair, old, new)
    if isinstance(new.value, Clause) and old.place != new.place:
        names = (str(item.place[0]) for item in (old, new))
        yield there.change("retargeted", " -> ".join(names), _ANOTHER_SECTION)
    yield from _fields(there, old.value, new.value)


def _order(pair: Pair, rule: Items, old: Collection[str], new: Collection[str]) -> Iterator[Change]:
    """A different order of common items, which matters only for the first."""
    before, after = (next(iter(names), "") for names in (old, new))
    # if neither is in both, one was replaced by the other, which is reported there
    if rule.first and before != after and (before in new or after in old):
        at: Place = ("workloads",)
        there = replace(pair, place=at, at=(at, at))
        yield there.change("retargeted", f"{before} first -> {after} first", rule.first)
        return
    both = [n for n in old if n in new], [n for n in new if n in old]
    if both[0] != both[1]:
        names = " -> ".join(map(flow_text, both))
        yield pair.change("cosmetic", names, "the order says nothing")


def _described(item: _Item) -> str:
    value = item.value
    if isinstance(value, Clause):
        return clause_text(value)
    if isinstance(value, Escalation):
        return f"do: {flow_text(value.do)}"  # when is its name
    return flow_text(value.model_dump(exclude=_NAMES, exclude_defaults=True, by_alias=True))


def _workloads(contract: Contract) -> dict[str, _Item]:
    listed = isinstance(contract.workloads, tuple)
    items = {}
    for i, (name, value) in enumerate(contract.all_workloads.items()):
        single = contract.workload is not None and name == "workload"
        index = i - (contract.workload is not None)
        at: Place = ("workload",) if single else ("workloads", index if listed else name)
        items[name] = _Item(value, at, at if single else ("workloads", name))
    return items


def _slices(contract: Contract) -> dict[str, _Item]:
    """Declared slices; one without an enforced clause cannot fail the contract."""
    spoken = {
        name
        for section, _, clause in contract.clauses()
        if clause.enforced
        for name in slices_of(contract, section, clause)
    }
    return {
        rule.name: _Item(rule, ("slices", i), ("slices", rule.name), rule.name in spoken)
        for i, rule in enumerate(contract.slices)
    }


def _clauses(contract: Contract) -> dict[str, _Item]:
    return {
        clause.id: _Item(clause, at, (*at[:-1], clause.id), clause.enforced)
        for _, at, clause in contract.clauses()
    }


def _rules(contract: Contract) -> dict[str, _Item]:
    """Escalation rules by condition; a second one with the same condition is a different rule."""
    items: dict[str, _Item] = {}
    for i, rule in enumerate(contract.escalation):
        name = flow_text(rule.when, longest=0)
        while name in items:
            name = f"{name} (again)"
        items[name] = _Item(rule, ("escalation", i), ("escalation", name))
    return items


# a field of many parts -> how they are found in a contract
_FINDERS: Mapping[str, Callable[[Contract], dict[str, _Item]]] = {
    "workload": _workloads,
    "labels": lambda c: {n: _Item(v, ("labels", n), ("labels", n)) for n, v in c.labels.items()},
    "slices": _slices,
    "numerical": _clauses,
    "escalation": _rules,
}


_VERSION = re.compile(
    r"v?(?P<numbers>\d{1,9}(?:\.\d{1,9})*)(?:-(?P<pre>[0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?"
)

Key = tuple[object, ...]


def order(version: str) -> Key:
    """The sort key of versions; other texts come last, in alphabetical order.

    Numbers are compared as numbers, and a pre-release comes before its release; build metadata
    after a + is ignored.

    >>> sorted(["1.10.0", "draft", "1.2.0", "1.10.0-rc.2", "1.10.0-rc.10"], key=order)
    ['1.2.0', '1.10.0-rc.2', '1.10.0-rc.10', '1.10.0', 'draft']

    Source:
        Semantic Versioning 2.0.0, item 11.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        return (1, version)
    parts = (match["pre"] or "").split(".")
    # a number comes before a text, and none after both
    pre = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if match["pre"])
    numbers = [int(part) for part in match["numbers"].split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return (0, tuple(numbers), pre == (), pre)


def advice(old: str, new: str) -> str:
    """The advice for a version that does not announce a breaking change; "" if it does.

    The first number must increase; before 1.0.0, the second may instead.  The promises of a
    pre-release may change until its release.

    >>> advice("1.4.2", "1.5.0")
    'metadata.version went from 1.4.2 to 1.5.0; a change that breaks wants 2.0.0'
    >>> advice("1.4.2", "2.0.0"), advice("0.3.0", "0.4.0")
    ('', '')
    """
    before, after = (_VERSION.fullmatch(version) for version in (old, new))
    if before is None or after is None:
        wrong = old if before is None else new
        return f"metadata.version {wrong!r} is no version such as 1.0.0, so it cannot say that"
    (major, minor), (major_after, minor_after) = (
        ([*map(int, match["numbers"].split(".")), 0])[:2] for match in (before, after)
    )
    if before["pre"] or major_after > major or (major == major_after == 0 and minor_after > minor):
        return ""
    wanted = f"{major + 1}.0.0" if major else f"0.{minor + 1}.0"
    went = f"stayed {old}" if old == new else f"went from {old} to {new}"
    return f"metadata.version {went}; a change that breaks wants {wanted}"


EXPIRES = "evidence expires: measure again"
CARRIES_OVER = "evidence carries over"


@dataclass(frozen=True)
class Difference:
    """Two versions of a contract, for one reader.

    Args:
        side: consumer: who relies on the promise; producer: who has to keep it.
    """

    old: Contract
    new: Contract
    side: Side = "consumer"

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes, breaking ones first; each kind in the order of the language."""
        unsorted = changes(self.old, self.new)
        return tuple(sorted(unsorted, key=lambda c: (not c.breaks(self.side), KINDS.index(c.kind))))

    @cached_property
    def breaking(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.breaks(self.side))

    @property
    def compatible(self) -> bool:
        return not self.breaking

    @property
    def evidence_expires(self) -> bool:
        """Whether evidence under the old version is invalid for the new one.

        Equal digests are necessary but not sufficient: weights and texts count separately.
        """
        return self.old.digest != self.new.digest

    @property
    def evidence(self) -> str:
        return EXPIRES if self.evidence_expires else CARRIES_OVER

    @property
    def sentence(self) -> str:
        """The answer on one line."""
        if not self.changes:
            return f"the same contract; {self.evidence}"
        if self.compatible:
            return f"compatible for the {self.side}: {counted(self.changes)}; {self.evidence}"
        return f"BREAKING for the {self.side}: {counted(self.breaking)}; {self.evidence}"

    @property
    def advice(self) -> str:
        """The advice about the version number, if a change breaks; else ""."""
        if self.compatible:
            return ""
        return advice(self.old.metadata.version, self.new.metadata.version)


def counted(listed: Iterable[Change]) -> str:
    """The number of changes of each kind, such as "2 tightened, 1 loosened"; or "no change".

    Changes without an enforced clause are counted separately.
    """
    listed = [*listed]
    counts = [(kind, sum(c.kind == kind and c.enforced for c in listed)) for kind in KINDS]
    counts.append(("of what is monitored", sum(not c.enforced for c in listed)))
    return ", ".join(f"{n} {kind}" for kind, n in counts if n) or "no change"
