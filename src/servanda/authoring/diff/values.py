# The values of a comparison: one change, and a part of two contracts as they are walked together.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from servanda.contract.model import Contract, Place
from servanda.errors import Where

Kind = Literal["retargeted", "loosened", "removed", "tightened", "added", "cosmetic"]
Side = Literal["consumer", "producer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIDES: tuple[Side, ...] = get_args(Side)

# The consumer relies on a promise, so less of it breaks; the producer must keep it, so more of
# it does.  Another promise under the same name breaks both.
BREAKING: Mapping[Side, tuple[Kind, ...]] = MappingProxyType(
    {
        "consumer": ("retargeted", "loosened", "removed"),
        "producer": ("retargeted", "tightened", "added"),
    }
)
# what a change is when it is read backwards
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
    """One part of a contract that another version says otherwise.

    Args:
        kind: tightened: more is promised; loosened: less; added, removed: a part of its own;
            retargeted: something else is promised, neither more nor less; cosmetic: nothing is.
        place: keys, and ids in place of indexes, such as ("statistical", "tv", "at_most").
        what: what it was and what it is, such as "0.02 -> 0.05".
        where_old, where_new: in the two texts: the part, or the nearest one around it that is
            written; None where there is no such part, or no text.
        why: why the direction is the one it is.
        was_enforced, is_enforced: whether the part bears on what can fail the contract, in the old
            one and in the new one.
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
        """Whether it bears on what can fail one of the two contracts."""
        return self.was_enforced or self.is_enforced

    @property
    def name(self) -> str:
        """The place as people write it."""
        return ".".join(map(str, self.place))

    def breaks(self, side: Side) -> bool:
        """Whether it takes from the one what was promised, or asks of the other what was not."""
        binding = self.was_enforced if side == "consumer" else self.is_enforced
        return binding and self.kind in BREAKING[side]


@dataclass(frozen=True)
class Pair:
    """A part of two contracts: what it is called, and where it stands in each.

    Args:
        contracts: the old one and the new one.
        place: as in Change; at: as each contract's `where` takes it; None: it has no such part.
        owners: the two mappings that hold the part.
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
        """A change of this part."""
        old, new = (
            None if at is None or kind == only_other else contract.where(*at)
            for contract, at, only_other in zip(
                self.contracts, self.at, ("added", "removed"), strict=True
            )
        )
        return Change(kind, self.place, what, old, new, why, *self.enforced)
