# What calibrating yields: a limit a clause, why it is not smaller, and what it is worth.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servanda.contract.model import Place
from servanda.traces.serialization import to_plain

# what a limit cannot be smaller for
Binds = Literal["sampling", "together", "self-noise", "record", "fact"]


# metrics whose limit is what one can afford to lose
_BUDGETS = ("reward_drift", "reward_gap", "policy_gradient_bias", "ratio_budget")
_SKEWED = 0.5  # of a mean, carried by 5 % of the groups: the bootstrap knows too little of them


@dataclass(frozen=True)
class Limit:
    """One clause's limit, from a run of a pair that is accepted.

    Args:
        slice: the one that decides: no smaller limit serves it.
        measured, floor: there, in the unit of the limit; of a percentile the percentile of
            what was measured, and of each side against itself.
        before: the limit that the contract had; None where it had no such clause.
        limit: None where it is refused.
        power: share of the later runs in which the clause holds on all its slices; None for
            a fact, which a sample has no part in.
        top: share of the mean that the top 5 % of the prompt groups carry, on the slice that
            decides; None of a percentile or a fact.
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
    top: float | None = None


@dataclass(frozen=True)
class Skipped:
    """A clause whose limit stays as it is, and why."""

    clause: str
    reason: str


@dataclass(frozen=True)
class Calibration:
    """The limits that a pair like this one keeps, at the contract's sizes and confidence.

    Args:
        asked: the requested power; power: the share of later runs in which all
            enforced clauses that were calibrated on samples hold at once; None: none was.
        groups: workload -> prompt groups of the run, and of a later one.
        resamples: how many later runs were drawn.
    """

    rows: tuple[Limit, ...]
    left: tuple[Skipped, ...]
    asked: float
    power: float | None
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    resamples: int = 0

    @property
    def limits(self) -> dict[Place, float]:
        """Place of a limit in the contract -> the new one."""
        return {(*row.place, "at_most"): row.limit for row in self.rows if row.limit is not None}

    @property
    def notes(self) -> dict[Place, str]:
        """Place of a limit that changed -> what it was, as a comment of the contract."""
        return {
            (*row.place, "at_most"): f"calibrated: was {row.before:g}"
            for row in self.rows
            if row.limit is not None and row.before is not None and row.limit != row.before
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What anyone who takes these limits should know first."""
        warnings = []
        for row in self.rows:
            if row.limit is None:
                continue
            if row.metric in _BUDGETS and row.before is not None and row.limit > row.before:
                warnings.append(
                    f"{row.clause}: a {row.metric} of {row.limit:g} is more than the budget of "
                    f"{row.before:g} that the contract certified; what it gives as the reason for "
                    "that number does not hold for this one"
                )
            if row.top is not None and row.top > _SKEWED:
                warnings.append(
                    f"{row.clause}: 5 % of the prompt groups carry {100 * row.top:.0f} % of its "
                    f"mean on slice {row.slice!r}: for such groups the stated power is too good"
                )
        return tuple(warnings)

    def to_dict(self) -> dict[str, Any]:
        return to_plain(self)
