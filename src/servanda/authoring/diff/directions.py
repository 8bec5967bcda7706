# Directions: the meaning of a changed value for a promise.
#
# Each rule has the reason for its direction.  `tightened` always implies the other version: keeping
# the new limit keeps the old one.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from servanda.authoring.diff.values import MIRROR, Change, Kind, Pair, flow_text
from servanda.contract.fields import duration_text

Direction = Callable[[Any, Any, Pair], Kind]

REWRITTEN = "it means the same, written in another way"


@dataclass(frozen=True)
class Rule:
    """The interpretation of a change of one field.

    Args:
        says: the direction as text, such as "lower is tightened".
        why: the reason for it, in a line.
        of: the kind of a move from one value to another.
        absent: text for a missing field.
        show: formats a value for messages.
    """

    says: str
    why: str
    of: Direction
    absent: str = "none"
    show: Callable[[Any], str] = flow_text

    def __call__(self, pair: Pair, old: Any, new: Any) -> Iterator[Change]:
        if _same(old, new):
            return
        kind = "cosmetic" if old == new else self.of(old, new, pair)
        why = REWRITTEN if kind == "cosmetic" and self.of is not _cosmetic else self.why
        names = [self._value_text(pair, i, value) for i, value in enumerate((old, new))]
        yield pair.change(kind, " -> ".join(names), why)

    def _value_text(self, pair: Pair, side: int, value: Any) -> str:
        """A value, and whether it is only the default."""
        if value is None:
            return self.absent
        owner, key = pair.owners[side], pair.place[-1]
        fields = getattr(type(owner), "model_fields", {})
        own = next((name for name, field in fields.items() if key in (name, field.alias)), key)
        written = own in getattr(owner, "model_fields_set", {own})
        return f"{self.show(value)}{'' if written else ' (default)'}"


@dataclass(frozen=True)
class Part:
    """A field with a structured value, whose fields are compared one by one.

    Args:
        scalar: rule for two scalars, if the field may be one.
        none: the kind if it is added, mirrored if it is removed.
    """

    why: str
    scalar: Rule | None = None
    none: Kind = "added"
    says: str = "by its own keys; added, removed"


@dataclass(frozen=True)
class Items:
    """A field with many parts, identified by name.

    Args:
        first: what depends on the first part; "" if the order is irrelevant.
    """

    why: str
    noun: str
    says: str = "item by item, by name; added, removed"
    first: str = ""


@dataclass(frozen=True)
class With:
    """A field that is compared together with another one."""

    field: str
    why: str

    @property
    def says(self) -> str:
        return f"with `{self.field}`"


@dataclass(frozen=True)
class Custom:
    """A field whose meaning depends on other parts of its contract."""

    says: str
    why: str
    compare: Callable[[Pair, Any, Any, str], Iterator[Change]]


Handling = Rule | Part | Items | With | Custom


def _same(old: Any, new: Any) -> bool:
    """Fields of one type are equal or not; in free data 1 is not 1.0, for the digest sees both."""
    free = isinstance(old, dict | tuple) and isinstance(new, dict | tuple)
    return as_text(old) == as_text(new) if free else old == new


def as_text(value: Any) -> str:
    """A value as text, as in the digest of a contract: 1 is not 1.0, nor true."""
    return json.dumps(to_jsonable_python(value), sort_keys=True)


def moved(old: float, new: float, *, up: Kind = "tightened") -> Kind:
    """The kind of a change of a number, if up is tighter, or looser."""
    if old == new:
        return "cosmetic"
    return up if new > old else MIRROR[up]


def _move(up: Kind, absent: float | None) -> Direction:
    def kind(old: float | None, new: float | None, _: Pair) -> Kind:
        before, after = (absent if value is None else value for value in (old, new))
        if before is None or after is None:
            return "retargeted"
        return moved(before, after, up=up)

    return kind


def higher(why: str, *, absent: float | None = None, time: bool = False) -> Rule:
    """More is tighter; absent: the number that a missing field counts as, if any."""
    show = duration_text if time else flow_text
    return Rule("higher is tightened", why, _move("tightened", absent), show=show)


def lower(why: str, *, absent: float | None = None, time: bool = False) -> Rule:
    """Less is tighter."""
    show = duration_text if time else flow_text
    return Rule("lower is tightened", why, _move("loosened", absent), show=show)


def ranked(*order: Any, why: str) -> Rule:
    """Words from the loosest to the tightest; those in a tuple are not comparable."""
    ranks = {
        word: rank
        for rank, words in enumerate(order)
        for word in (words if isinstance(words, tuple) else (words,))
    }

    def kind(old: Any, new: Any, _: Pair) -> Kind:
        same = ranks[old] == ranks[new]
        return "retargeted" if same else moved(ranks[old], ranks[new])

    names = [" = ".join(map(flow_text, w)) if isinstance(w, tuple) else flow_text(w) for w in order]
    return Rule(f"{' < '.join(names)}", why, kind)


def set_move(old: set[Any], new: set[Any]) -> Kind:
    """More of a set is tighter; neither more nor less is something else."""
    if old == new:
        return "cosmetic"
    return "tightened" if old < new else "loosened" if new < old else "retargeted"


def inclusion(why: str) -> Rule:
    """A set of names: a superset is tighter."""
    return Rule("superset is tightened", why, lambda old, new, _: set_move({*old}, {*new}))


def _wider(old: tuple[float, float] | None, new: tuple[float, float] | None, _: Pair) -> Kind:
    if old is None or new is None:
        return "retargeted"
    if new[0] <= old[0] and new[1] >= old[1]:
        return "tightened"
    return "loosened" if old[0] <= new[0] and old[1] >= new[1] else "retargeted"


def wider(why: str) -> Rule:
    """A range: the one that contains the other is tighter."""
    return Rule("wider is tightened", why, _wider)


def other(why: str, *, says: str = "retargeted") -> Rule:
    """Any change makes it a different promise."""
    return Rule(says, why, lambda *_: "retargeted")


def _cosmetic(*_: Any) -> Kind:
    return "cosmetic"


def cosmetic(why: str) -> Rule:
    """No change affects a promise."""
    return Rule("cosmetic", why, _cosmetic)


NEVER = math.inf  # for a time after which an action follows
