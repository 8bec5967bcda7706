# Lint of the declared slices: known fields, conditions that some token can meet.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servanda.contract.clause import WHOLE, SliceRule
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.judgement.slices.rules import FIELDS, LABEL, MOVED, OPERATORS, Field, field_of
from servanda.registry import did_you_mean, quoted

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
