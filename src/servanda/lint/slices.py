# Lint of the declared slices: known fields, conditions that some token can meet.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servanda.contract import WHOLE, Contract, SliceRule
from servanda.lint.finding import Finding, nearest, quoted
from servanda.marks import Path
from servanda.slices import FIELDS, LABEL, OPERATORS


def slices(contract: Contract) -> Iterator[Finding]:
    """Each slice has its own name and one way to find its tokens."""
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
    """Whether tokens can be sliced by a field."""
    if name in FIELDS or (name.startswith(LABEL) and len(name) > len(LABEL)):
        return
    if name.startswith("outcome."):
        message = (
            f"{quoted(name)} is known only after the token is drawn: on such a slice only the mass "
        )
        message += "gap and the two-sided contribution are defined, and this version judges neither"
        hint = "slice by what is known before, such as context.entropy_nats or context.p_max"
    else:
        message = f"no field is named {quoted(name)}"
        hint = nearest(name, [*FIELDS, "labels.<name>"])
    yield Finding(path, message, hint, key=key)


def _split(path: Path, rule: SliceRule) -> Iterator[Finding]:
    if rule.split is not None:
        yield from field((*path, "split"), rule.split, key=False)
        if rule.split in FIELDS and rule.at is None:
            message = f"a split of {rule.split} needs the edges of its buckets"
            yield Finding((*path, "split"), message, "add at: [8, 16]")
    if rule.at is None:
        return
    at = (*path, "at")
    if rule.split is None:
        yield Finding(at, "at gives the edges of a split, and there is no split", "remove at")
    elif rule.split.startswith(LABEL):
        message = f"{rule.split} is split by its values, it has no edges"
        yield Finding(at, message, "remove at; most: 8 bounds how many values get a slice")
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
        label = name.startswith(LABEL)
        right = True
        for operator, value in conditions.items():
            for finding in _condition((*here, operator), operator, value, label=label):
                right = False
                yield finding
        if conditions and right and _is_empty(conditions):
            yield Finding(
                here,
                f"no {name} can meet this condition",
                "the lower end has to lie below the upper",
            )


def _condition(path: Path, operator: str, value: Any, *, label: bool) -> Iterator[Finding]:
    if operator not in OPERATORS:
        message = f"no operator is named {quoted(operator)}"
        yield Finding(path, message, nearest(operator, OPERATORS), key=True)
    elif operator == "exists":
        if not isinstance(value, bool):
            yield Finding(path, "exists takes true or false", "write {exists: true}")
    elif operator == "in":
        right = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        right = right and all(isinstance(v, str) if label else is_number(v) for v in value)
        if not right:
            kind, hint = ("texts", "[math, code]") if label else ("numbers", "[0, 1]")
            yield Finding(path, f"in takes a list of {kind}", f"write {{in: {hint}}}")
    elif label:
        message = f"a label is a text, {operator} compares numbers"
        yield Finding(path, message, "write {in: [math, code]} or {exists: true}", key=True)
    elif not is_number(value):
        yield Finding(path, f"{operator} takes a number", f"write {{{operator}: 3.0}}")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_empty(conditions: Mapping[str, Any]) -> bool:
    low = max((conditions[op] for op in ("gte", "gt") if op in conditions), default=-math.inf)
    high = min((conditions[op] for op in ("lte", "lt") if op in conditions), default=math.inf)
    closed = conditions.get("gt") != low and conditions.get("lt") != high
    return low > high or (low == high and not closed)
