# The values of a comparison: one change, and a pair of parts of two contracts; and the values of a
# contract on one line.

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic_core import to_jsonable_python

from servanda.contract.model import Clause, Contract, Place
from servanda.errors import Where
from servanda.report.format import line

Kind = Literal["retargeted", "loosened", "removed", "tightened", "added", "cosmetic"]
Side = Literal["consumer", "producer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIDES: tuple[Side, ...] = get_args(Side)

# The consumer relies on a promise, so a looser one breaks; the producer must keep it, so a tighter
# one breaks.  A different promise under the same name breaks both.
BREAKING: Mapping[Side, tuple[Kind, ...]] = MappingProxyType(
    {
        "consumer": ("retargeted", "loosened", "removed"),
        "producer": ("retargeted", "tightened", "added"),
    }
)
# the kind of a change in reverse
MIRROR: Mapping[Kind, Kind] = MappingProxyType(
    {
        "tightened": "loosened",
        "loosened": "tightened",
        "added": "removed",
        "removed": "added",
        "retargeted": "retargeted",
        "cosmetic": "cosmetic",
    }
)


@dataclass(frozen=True)
class Change:
    """One part of a contract that another version changes.

    Args:
        kind: tightened: a stronger promise; loosened: a weaker one; added, removed: a whole part;
            retargeted: a different promise, neither stronger nor weaker; cosmetic: no promise.
        place: keys, and ids in place of indexes, such as ("statistical", "tv", "at_most").
        what: old and new value, such as "0.02 -> 0.05".
        where_old, where_new: the places in the two texts, of the part or its nearest written
            parent; None without such a part or text.
        why: the reason for the direction.
        was_enforced, is_enforced: whether the part can affect a failure of the contract, in the old
            and in the new one.
    """

    kind: Kind
    place: Place
    what: str
    where_old: Where | None = None
    where_new: Where | None = None
    why: str = ""
    was_enforced: bool = True
    is_enforced: bool = True

    @property
    def enforced(self) -> bool:
        """Whether it can affect a failure of one of the two contracts."""
        return self.was_enforced or self.is_enforced

    @property
    def name(self) -> str:
        """The place as text."""
        return ".".join(map(str, self.place))

    def breaks(self, side: Side) -> bool:
        """Whether it weakens a promise for the consumer, or strengthens one for the producer."""
        binding = self.was_enforced if side == "consumer" else self.is_enforced
        return binding and self.kind in BREAKING[side]


@dataclass(frozen=True)
class Pair:
    """A part of two contracts: its name, and its place in each.

    Args:
        contracts: the old one and the new one.
        place: as in Change; at: argument of each contract's `where`; None: no such part.
        owners: the two mappings with the part.
        enforced: as in Change, of the old one and of the new one.
    """

    contracts: tuple[Contract, Contract]
    place: Place = ()
    at: tuple[Place | None, Place | None] = ((), ())
    owners: tuple[Any, Any] = (None, None)
    enforced: tuple[bool, bool] = (True, True)

    def key(self, name: str, owners: tuple[Any, Any]) -> Pair:
        """A key of two mappings."""
        old, new = (None if at is None else (*at, name) for at in self.at)
        return replace(self, place=(*self.place, name), at=(old, new), owners=owners)

    def change(self, kind: Kind, what: str, why: str = "") -> Change:
        old, new = (
            None if at is None or kind == only_other else contract.where(*at)
            for contract, at, only_other in zip(
                self.contracts, self.at, ("added", "removed"), strict=True
            )
        )
        return Change(kind, self.place, what, old, new, why, *self.enforced)


_LONGEST = 40  # most characters of one value
_PLAIN = re.compile(r"[A-Za-z0-9_./+\-][\w ./+\-]*")


def flow_text(value: Any, longest: int = _LONGEST) -> str:
    """A value in the flow style of YAML, cut where it is long; longest: 0 cuts nothing.

    >>> flow_text(0.02), flow_text(1000.0), flow_text((0.01, 0.05))
    ('0.02', '1000', '[0.01, 0.05]')
    >>> flow_text({"labels.x": {"in": ["a"]}})
    '{labels.x: {in: [a]}}'
    """
    return line(_flow(to_jsonable_python(value)), longest)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_flow(v)}" for key, v in value.items() if v is not None)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else repr(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else f"'{text}'"


def clause_text(clause: Clause) -> str:
    """A clause in a few words, such as "mean tv at most 0.02, monitored"."""
    parts = [f"{clause.aggregate or ''} {clause.metric}".strip()]
    for words in ("at_most", "at_least"):
        limit = getattr(clause, words)
        if limit is not None:
            parts[0] += f" {words.replace('_', ' ')} {flow_text(limit)}"
    if clause.slices is not None:
        parts.append(f"on {', '.join(clause.slices)}")
    return line(", ".join([*parts, *([] if clause.enforced else ["monitored"])]), 2 * _LONGEST)
