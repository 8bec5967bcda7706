# What calibrating yields: a limit a clause, why it is not smaller, and what it is worth.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servanda.contract import Place
from servanda.plain import to_plain

# what a limit cannot be smaller for
Binds = Literal["sampling", "together", "self-noise", "record", "fact"]


@dataclass(frozen=True)
class Row:
    """One clause's limit, from a run of a pair that is accepted.

    Args:
        slice: the one that decides: no smaller limit serves it.
        measured, floor: there, in the unit of the limit; of a percentile the percentile of
            what was measured, and of each side against itself.
        before: the limit that the contract had; None where it had no such clause.
        limit: None where it is refused.
        power: share of the later runs in which the clause holds on all its slices; None for
            a fact, which a sample has no part in.
        note: where a limit is refused, why; of a fact, by how much it is beyond the run's.
    """

    clause: str
    metric: str
    aggregate: str
    slice: str
    place: Place
    measured: float | None
    floor: float | None
    before: float | None
    limit: float | None
    power: float | None
    binds: Binds
    enforced: bool = True
    note: str = ""


@dataclass(frozen=True)
class Left:
    """A clause whose limit stays as it is, and why."""

    clause: str
    reason: str


@dataclass(frozen=True)
class Calibration:
    """The limits that a pair like this one keeps, at the contract's sizes and confidence.

    Args:
        asked: the power that was asked for; power: the share of later runs in which all
            enforced clauses that were calibrated on samples hold at once; None: none was.
        groups: workload -> prompt groups of the run, and of a later one.
        resamples: how many later runs were drawn.
    """

    rows: tuple[Row, ...]
    left: tuple[Left, ...]
    asked: float
    power: float | None
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    resamples: int = 0

    @property
    def limits(self) -> dict[Place, float]:
        """Place of a limit in the contract -> the new one."""
        return {(*row.place, "at_most"): row.limit for row in self.rows if row.limit is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return to_plain(self)
