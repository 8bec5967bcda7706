# The result of a calibration: a limit per clause, the reason of its size, and its power.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servanda.contract.model import Place
from servanda.traces.serialization import to_plain

# reasons why a limit is not smaller
Binds = Literal["sampling", "together", "self-noise", "record", "fact"]


# metrics whose limit is an acceptable loss
_BUDGETS = ("reward_drift", "reward_gap", "policy_gradient_bias", "ratio_budget")
_SKEWED = 0.5  # share of a mean in 5 % of the groups, above which the bootstrap is unreliable


@dataclass(frozen=True)
class Limit:
    """One clause's limit, from a run of an accepted pair.

    Args:
        slice: the deciding slice, which needs this limit.
        measured, floor: on that slice, in the unit of the limit; for a percentile clause the
            measured percentile, and that of the noise.
        before: the earlier limit; None without such a clause.
        limit: None if refused.
        power: share of later runs in which the clause holds on all its slices; None for a fact.
        top: share of the mean in the top 5 % of the prompt groups, on the deciding slice; None for
            a percentile or a fact.
        note: the reason of a refusal; for a fact, its distance from the run's value.
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
    """A clause whose limit is unchanged, with the reason."""

    clause: str
    reason: str


@dataclass(frozen=True)
class Calibration:
    """The limits that such a pair keeps, at the contract's sizes and confidence.

    Args:
        asked: the requested power; power: the share of later runs in which all
            enforced clauses that were calibrated on samples hold at once; None: none was.
        groups: workload -> prompt groups of the run, and of a later one.
        resamples: number of simulated later runs.
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
        """Place of a changed limit -> its earlier value, as a comment in the contract."""
        return {
            (*row.place, "at_most"): f"calibrated: was {row.before:g}"
            for row in self.rows
            if row.limit is not None and row.before is not None and row.limit != row.before
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about these limits."""
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
