# Clauses that are not judged here: not known to this version, or not a matter of this stage.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from servanda.judgement.clauses.base import Cell, CellVerdict, Kind, Look, Source, blank


@dataclass(frozen=True)
class Later(Kind):
    """Known by name; the answer is inconclusive, never a pass."""

    reason: str
    source: ClassVar[Source] = "none"

    def judge(self, cell: Cell, rounds: list[Any], floor: object, look: Look) -> CellVerdict:
        return blank(cell, "inconclusive", self.reason)


@dataclass(frozen=True)
class NotHere(Kind):
    """Does not exist at this stage, or on these engines: shown with the reason, not counted.

    Unless the clause is `required`: then its absence is an error.
    """

    reason: str
    required: bool = False
    source: ClassVar[Source] = "none"

    def judge(self, cell: Cell, rounds: list[Any], floor: object, look: Look) -> CellVerdict:
        return blank(cell, "error" if self.required else "not applicable", self.reason)
