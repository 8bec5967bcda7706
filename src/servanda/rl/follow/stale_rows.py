# Rows of the probes that an engine answers as at an earlier sync, while it follows on the others:
# those of a cache that outlives a sync, or of one of several engines behind one address.
#
# A slope of all rows says little of them: rows at 0 among rows at 1 widen its interval.
#
# Axes: K syncs, N scored tokens, U rows.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.theory.sampling import Floats, Ints

Bools = NDArray[np.bool_]

# noise floors by which a row has to have moved, to be told from one that has not: half of them,
# over 10 tokens, are six standard deviations of independent noise
_MOVED = 4.0
# share of the known syncs at which stale rows are stale: the same rows at least, others at most
_SAME, _OTHERS = 0.9, 0.6


@dataclass(frozen=True)
class StaleRows:
    """Rows that have not changed since a reference sync.

    Args:
        stale_KU: rows that are closer to standing still than to following, at each sync.
        known_KU: rows that have moved far enough to tell.
        p: probability of as many of them, and as few beyond twice the trainer's change, if a row
            that follows is as likely to be as far on either side of it.
        rest_nats: root of the mean square that is left of the engine's change, if stale rows have
            none and the others have the trainer's.
    """

    stale_KU: Bools
    known_KU: Bools
    p: float
    rest_nats: float

    def __str__(self) -> str:
        """How many rows; and whether they are the same ones, where rows known twice show it."""
        stale_U, known_U = self.stale_KU.any(axis=0), self.known_KU.any(axis=0)
        twice_U = stale_U & (self.known_KU.sum(axis=0) > 1)
        known = int(self.known_KU[:, twice_U].sum())
        often = self.stale_KU[:, twice_U].sum() / known if known else math.nan
        if often <= _OTHERS:
            share = self.stale_KU.sum() / self.known_KU.sum()
            return f"{share:.0%} of the rows, others at each sync"
        same = ", the same at each sync" if often >= _SAME else ""
        return f"{int(stale_U.sum())} of {int(known_U.sum())} rows{same}"


def stale_rows(
    trainer_KN: Floats, engine_KN: Floats, start_U: Ints, floor_nats: float
) -> StaleRows:
    """Which rows of an engine have not changed, and the probability of that.

    Args:
        trainer_KN, engine_KN: change of each side since the reference; a missing one is 0 in both.
        start_U: index of the first token of each row.
        floor_nats: root of the mean square of their difference at equal weights.
    """
    xx_KU = np.add.reduceat(trainer_KN**2, start_U, axis=1)
    xy_KU = np.add.reduceat(trainer_KN * engine_KN, start_U, axis=1)
    tokens_KU = np.add.reduceat((trainer_KN != 0).astype(float), start_U, axis=1)
    known_KU = xx_KU > tokens_KU * (_MOVED * floor_nats) ** 2
    stale_KU = known_KU & (xy_KU < 0.5 * xx_KU)
    beyond_KU = known_KU & (xy_KU > 1.5 * xx_KU)
    signs_U = beyond_KU.sum(axis=0, dtype=np.int64) - stale_KU.sum(axis=0, dtype=np.int64)
    of_N = np.repeat(np.arange(len(start_U)), np.diff([*start_U, trainer_KN.shape[1]]))
    rest_KN = np.where(stale_KU[:, of_N], engine_KN, engine_KN - trainer_KN)[known_KU[:, of_N]]
    rest = float(np.sqrt(np.mean(rest_KN**2))) if rest_KN.size else 0.0
    return StaleRows(stale_KU, known_KU, sign_probability(signs_U), rest)


def sign_probability(values_U: Ints) -> float:
    """Probability that independent fair signs of |values| add up to the sum of values or to less.

    >>> sign_probability(np.array([-1, -1, -1, 0])), sign_probability(np.array([-2, 2]))
    (0.125, 0.75)
    """
    sizes = np.abs(values_U[values_U != 0])
    law = np.ones(1)  # of the sum of the sizes with a positive sign
    for size in sizes:
        law = 0.5 * (np.pad(law, (0, size)) + np.pad(law, (size, 0)))
    return float(law[: int(values_U.sum() + sizes.sum()) // 2 + 1].sum())
