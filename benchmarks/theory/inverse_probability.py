# Unequal: the mean over all served units, where only some are scored, some likelier than others.
#
# The chance that a unit is scored is decided before anything of it is known.  With `least`, the
# smallest chance that the plan allows,
#
#     X' = least x / chance   where the unit is scored, else 0
#
# lies in [0, 1] and has the mean least * mu, given everything earlier: LogMoment certifies its
# mean over all served units, and a limit m of x is the limit least * m of X'.
#
# Where chances are very uneven, X' of the often scored is tiny and says next to nothing.  Then
# one state for each chance, and the parts of the mean are bounded one by one (ByChance).

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from servanda.errors import EvidenceError
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import Floats, LogMoment, Process, check_unit


@dataclass(frozen=True)
class Unequal(Process):
    """Evidence about the mean of x over served units; `+` adds later closed rounds.

    Args:
        least: smallest chance with which any unit is scored, in (0, 1], fixed in the plan.
        moment: of X', over all served units.
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
        """Of one closed round.

        Args:
            x_N: values of the units that were scored, in [0, 1].
            chance_N: with what chance each of them was.
            served: units of the round, scored or not.
            lost_M: chances of the units that were chosen and yielded no value; they count as
                x = 1 for `holds` and as x = 0 for `violated`.

        Raises:
            EvidenceError: a value outside [0, 1], a chance outside [least, 1], or fewer units
                than were scored.
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
        """Horvitz and Thompson's estimate, a lost unit as 0; NaN where nothing was served."""
        return self.moment.total / (self.least * self.n) if self.n else math.nan

    def below_growth(self, limit: float) -> Floats:
        return self.moment.below_growth(self.least * limit)

    def above_growth(self, limit: float) -> Floats:
        return self.moment.above_growth(self.least * limit)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Lower and upper bound of the mean, each at confidence 1 - alpha, valid at every look."""
        return interval(self, alpha)


@dataclass(frozen=True)
class ByChance:
    """One `Unequal` for each chance that the plan has; `+` adds later closed rounds.

    The mean over all served units is the mean of the parts', weighted by how many units
    each served.  A part is bounded at alpha / (number of parts), so that all bounds are right
    at once.

    Args:
        parts: of chances that ascend and differ; each part's `least` is its chance.
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
        """Of one closed round.

        Args:
            x_N, chance_N, lost_M: as for `Unequal.of`.
            served: chance -> units of the round that had it, for every chance of the plan.

        Raises:
            EvidenceError: as `Unequal.of`, or a unit has a chance that the plan has not.
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
        """Lower and upper bound of the mean, each at confidence 1 - alpha, valid at every look."""
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
