# Unequal: the mean over all served units from scored ones, with unequal inclusion probabilities.
#
# The inclusion probability of a unit is decided before any of its data is known.  With `least`, the
# smallest probability in the plan,
#
#     X' = least x / chance   if the unit is scored, else 0
#
# is in [0, 1] and has the mean least * mu, given everything earlier: LogMoment certifies its mean
# over all served units, and a limit m of x is the limit least * m of X'.
#
# If probabilities are very unequal, X' of frequently scored units is tiny and has little
# information. Then there is one state per probability, and the parts of the mean are bounded
# separately (ByChance).

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import Floats
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment, Process, check_unit


@dataclass(frozen=True)
class Unequal(Process):
    """Evidence about the mean of x over served units; `+` adds later closed rounds.

    Args:
        least: smallest inclusion probability of any unit, in (0, 1], fixed in the plan.
        moment: LogMoment of X', over all served units.
    """

    least: float
    moment: LogMoment = field(default_factory=LogMoment)

    @classmethod
    def of(
        cls,
        x_N: ArrayLike,
        chance_N: ArrayLike,
        served: int,
        least: float,
        lost_M: ArrayLike = (),
    ) -> Unequal:
        """From one closed round.

        Args:
            x_N: values of the scored units, in [0, 1].
            chance_N: their inclusion probabilities.
            served: number of units of the round, scored or not.
            lost_M: inclusion probabilities of selected units without a value; they count as x = 1
                for `holds` and as x = 0 for `violated`.

        Raises:
            EvidenceError: a value outside [0, 1], a probability outside [least, 1], or more scored
                than served units.
        """
        x_N, chance_N, lost_M = (np.asarray(a, dtype=np.float64) for a in (x_N, chance_N, lost_M))
        check_unit(x_N)
        for chances in (chance_N, lost_M):
            _check_chances(chances, least)
        if x_N.shape != chance_N.shape:
            raise EvidenceError(f"{x_N.size} values have {chance_N.size} chances")
        if served < x_N.size + lost_M.size:
            raise EvidenceError(
                f"of {served} served units {x_N.size + lost_M.size} cannot have been chosen"
            )
        known = LogMoment.of(least * x_N / chance_N)
        worst = LogMoment.of(least / lost_M)
        return cls(
            least,
            LogMoment(served, (known + worst).below, known.above, known.total, lost_M.size),
        )

    def __add__(self, other: Unequal) -> Unequal:
        if self.least != other.least:
            raise EvidenceError(
                f"units scored with a chance of {self.least} or more and of {other.least} or more "
                "come from two plans"
            )
        return Unequal(self.least, self.moment + other.moment)

    @property
    def n(self) -> int:  # type: ignore[override]
        """Served units."""
        return self.moment.n

    @property
    def mean(self) -> float:
        """The Horvitz-Thompson estimate, with lost units as 0; NaN without served units."""
        return self.moment.total / (self.least * self.n) if self.n else math.nan

    def below_growth(self, limit: float) -> Floats:
        return self.moment.below_growth(self.least * limit)

    def above_growth(self, limit: float) -> Floats:
        return self.moment.above_growth(self.least * limit)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Anytime-valid lower and upper bound of the mean, each at confidence 1 - alpha."""
        return interval(self, alpha)


@dataclass(frozen=True)
class ByChance:
    """One `Unequal` per inclusion probability of the plan; `+` adds later closed rounds.

    The mean over all served units is the mean of the parts, weighted by their served units. Each
    part is bounded at alpha / (number of parts), so that all bounds hold simultaneously.

    Args:
        parts: with ascending, distinct probabilities; each part's `least` is its probability.
    """

    parts: tuple[Unequal, ...]

    @classmethod
    def of(
        cls,
        x_N: ArrayLike,
        chance_N: ArrayLike,
        served: Mapping[float, int],
        lost_M: ArrayLike = (),
    ) -> ByChance:
        """From one closed round.

        Args:
            x_N, chance_N, lost_M: see `Unequal.of`.
            served: probability -> served units of the round, for every probability of the plan.

        Raises:
            EvidenceError: as in `Unequal.of`, or a unit has a probability that is not in the plan.
        """
        x_N, chance_N, lost_M = (np.asarray(a, dtype=np.float64) for a in (x_N, chance_N, lost_M))
        strange = sorted({*chance_N.tolist(), *lost_M.tolist()} - served.keys())
        if strange:
            raise EvidenceError(f"the plan has no unit with a chance of {strange[0]}")
        if x_N.shape != chance_N.shape:
            raise EvidenceError(f"{x_N.size} values have {chance_N.size} chances")
        return cls(
            tuple(
                Unequal.of(x_N[here], chance_N[here], n, chance, lost_M[lost_M == chance])
                for chance, n in sorted(served.items())
                for here in (chance_N == chance,)
            )
        )

    def __add__(self, other: ByChance) -> ByChance:
        if len(self.parts) != len(other.parts):
            raise EvidenceError(
                f"{len(self.parts)} chances and {len(other.parts)} come from two plans"
            )
        return ByChance(tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    @property
    def n(self) -> int:
        """Served units."""
        return sum(part.n for part in self.parts)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Anytime-valid lower and upper bound of the mean, each at confidence 1 - alpha."""
        if not self.n:
            return 0.0, 1.0
        ends = [part.interval(alpha / len(self.parts)) for part in self.parts]
        weights = [part.n / self.n for part in self.parts]
        low, high = (
            math.fsum(w * end[side] for w, end in zip(weights, ends, strict=True))
            for side in (0, 1)
        )
        return low, min(high, 1.0)


def _check_chances(chance_N: Floats, least: float) -> None:
    if not 0.0 < least <= 1.0:
        raise EvidenceError(f"the least chance must lie in (0, 1], found {least}")
    wrong_N = ~((chance_N >= least) & (chance_N <= 1.0))
    if wrong_N.any():
        raise EvidenceError(
            f"a unit was scored with a chance of {chance_N[wrong_N][0]}, outside [{least}, 1]"
        )
