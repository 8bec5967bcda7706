# Lint of the escalation: the condition and the actions of each rule.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from servanda.contract.actions import ACTIONS
from servanda.contract.clause import SECTIONS
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import EXTERNAL, Contract
from servanda.judgement.clauses.scope import known_by_name, slices_of
from servanda.judgement.lint.slices import is_number
from servanda.judgement.slices.rules import OPERATORS
from servanda.registry import did_you_mean, quoted

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
