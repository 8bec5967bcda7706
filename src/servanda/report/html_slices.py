# What the slices of a verdict are, in words, which of them share one split, and the place of each
# cell on the page.

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from servanda.contract.clause import WHOLE, SliceRule
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.slices.rules import modulo
from servanda.report import format

_SIGNS = {"gte": "≥", "gt": ">", "lte": "≤", "lt": "<"}
# field -> (what it is of a token or request, the unit of its number)
_FIELDS = {
    "request.prompt_tokens": ("prompt", "tokens"),
    "context.position": ("position in the response", ""),
    "context.length": ("context", "tokens"),
    "context.turn": ("turn", ""),
    "context.turn_position": ("position in the turn", ""),
    "context.row": ("index of the sequence", ""),
    "context.entropy_nats": ("entropy of the infer kernel", "nats"),
    "context.p_max": ("probability of the most likely token", ""),
    "context.previous_class": ("class of the token before", ""),
    "outcome.rank": ("rank of the sampled token", ""),
    "outcome.logp_nats": ("logprob of the sampled token", "nats"),
    "outcome.token_id": ("id of the sampled token", ""),
    "outcome.from_end": ("tokens after it", ""),
    "outcome.token_class": ("class of the sampled token", ""),
    "outcome.staleness": ("age in weight updates", ""),
}

_COUNTS = {name for name, (_, unit) in _FIELDS.items() if unit == "tokens"} | {
    *("context.position", "context.turn", "context.turn_position"),
    *("outcome.rank", "outcome.staleness", "outcome.token_id", "outcome.from_end", "context.row"),
}


class SliceWords(NamedTuple):
    """A slice in words.

    Args:
        name: as the contract has it; definition: "" where it is not known, or says no more.
        split: the rule that it is of; slices of one split have no token in common.
    """

    name: str
    definition: str
    split: str


def slice_words(contract: Contract | None) -> SlicesOf:
    return SlicesOf({rule.name: rule for rule in contract.slices} if contract else {})


class SlicesOf(NamedTuple):
    """The slices of one contract."""

    rules: Mapping[str, SliceRule]

    def of_cell(self, cell: CellVerdict) -> SliceWords:
        """The place of a cell: a slice, or training steps and the slice if it is not the whole."""
        inner = self.of(cell.slice)
        if cell.steps is None:
            return inner
        first, last = cell.steps
        text = f"training step {first}" if first == last else f"training steps {first} to {last}"
        more = "" if cell.slice == WHOLE else f", {inner.definition or inner.name}"
        return SliceWords(format.line(cell.place), text + more, "single training steps")

    def of(self, name: str) -> SliceWords:
        """A slice by its name, which may be a value or a bucket of a split."""
        if name == WHOLE:
            return SliceWords("whole traffic", "", "")
        rule = self.rules.get(name)
        if rule is not None and rule.match is not None:
            terms = [_match(field, of) for field, of in rule.match.items()]
            return SliceWords(format.line(name), "; ".join(terms), "")
        for rule in self.rules.values():
            rest = name.removeprefix(rule.name)
            if rule.split and rest != name and rest[:1] in "=<>":
                # a split of a label that has its name says all that there is to say
                own = rest[:1] == "=" and rule.split == f"labels.{rule.name}"
                words = "" if own else _bucket(rule.split, rest)
                return SliceWords(format.line(name), words, rule.name)
        return SliceWords(format.line(name), "", "")


def _field(name: str) -> tuple[str, str]:
    base, modulus = modulo(name)
    if base in _FIELDS:
        words, unit = _FIELDS[base]
        return (words, unit) if modulus is None else (f"{words} modulo {modulus}", "")
    return (f"label {name.partition('.')[2] or name}", "")


def _match(field: str, conditions: Mapping[str, Any]) -> str:
    """
    >>> _match("request.prompt_tokens", {"gte": 257.0})
    'prompt ≥ 257 tokens'
    >>> _match("labels.env", {"in": ["a", "b"]}), _match("context.turn", {"gte": 1, "lte": 1})
    ('label env is a or b', 'turn 1')
    """
    name, unit = _field(field)
    if {*conditions} == {"gte", "lte"} and conditions["gte"] == conditions["lte"]:
        return f"{name} {conditions['gte']:g} {unit}".strip()
    parts = []
    for op, value in conditions.items():
        if op in _SIGNS:
            parts.append(f"{_SIGNS[op]} {value:g} {unit}".strip())
        elif op == "exists":
            parts.append("is set" if value else "is not set")
        else:
            values = " or ".join(map(str, value)) if isinstance(value, list | tuple) else value
            parts.append(f"is {values}")
    return format.line(f"{name} {' and '.join(parts)}", 90)


def _bucket(field: str, rest: str) -> str:
    """
    >>> _bucket("context.position", "<8"), _bucket("context.position", "=8..16")
    ('position in the response < 8', 'position in the response 8 to 15')
    >>> _bucket("labels.domain", "=json"), _bucket("request.prompt_tokens", ">=64")
    ('label domain is json', 'prompt ≥ 64 tokens')
    """
    name, unit = _field(field)
    if match := re.fullmatch(r"=(-?[\d.]+)\.\.(-?[\d.]+)", rest):
        low, high = match.groups()
        if field in _COUNTS and high.isdigit():
            return f"{name} {low} to {int(high) - 1} {unit}".strip()
        return f"{name} from {low} to below {high} {unit}".strip()
    for sign, shown in ((">=", "≥"), ("<", "<")):
        if rest.startswith(sign):
            return f"{name} {shown} {rest.removeprefix(sign)} {unit}".strip()
    value = rest.removeprefix("=")
    others = {"(other)": "is any other", "(none)": "is not set"}
    return format.line(f"{name} {others.get(value, f'is {value}')}", 90)


def anchors(cells: Iterable[CellVerdict]) -> dict[int, str]:
    """The place of each cell on the page, by its index: no two are the same.

    A cell is found by its clause and slice, so a link to it holds for later runs of the contract.
    """
    found: dict[int, str] = {}
    taken: set[str] = set()
    for i, cell in enumerate(cells):
        name = base = f"cell-{slug(cell.clause)}-{slug(cell.place)}"
        again = 1
        while name in taken:
            again += 1
            name = f"{base}-{again}"
        taken.add(name)
        found[i] = name
    return found


def slug(text: str) -> str:
    """A text as part of an address.

    >>> slug("depth>=16"), slug("Where, worst first")
    ('depth-ge-16', 'where-worst-first')
    """
    for sign, word in ((">=", "-ge-"), ("<", "-lt-"), ("..", "-to-")):
        text = text.replace(sign, word)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "x"
