# GroupRatio: evidence about a token-weighted mean over a population of prompt groups.
#
# The estimand is E[sum of x over the slice's tokens] / E[tokens in the slice], for a
# prompt group drawn at random.  It is below m exactly when E Z < m for
#     Z = m + sum (x_t - m) / capacity   in [0, 1],
# capacity = the largest number of slice tokens that any group can have, fixed in the plan.
# Z depends on m, so (sum of x, tokens) is kept for each group.  A mean of per-sequence
# means would be another, wrong number: lengths are random and go with the divergence.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.stats.log_moment import NEG, POS, log_mean_exp

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupRatio:
    """Per prompt group of a slice: sum of x, tokens with a value, tokens without.

    Groups that have no token in the slice leave every statement as it was; they are
    counted (`launched`) but not stored.  A missing token counts as x = 1 for `holds` and
    as x = 0 for `violated`.
    """

    capacity: int
    launched: int = 0
    total_G: tuple[float, ...] = ()
    tokens_G: tuple[int, ...] = ()
    missing_G: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for total, tokens, missing in zip(self.total_G, self.tokens_G, self.missing_G, strict=True):
            # a hair above is rounding of a sum of ones
            if not 0.0 <= total <= tokens * (1 + 1e-12) or tokens + missing > self.capacity:
                raise EvidenceError(
                    f"a prompt group has sum {total} over {tokens} tokens and {missing} missing "
                    f"ones, with room for {self.capacity}"
                )

    @classmethod
    def join(cls, capacity: int, parts: Sequence[GroupRatio]) -> GroupRatio:
        """Disjoint rounds of one plan as one."""
        for part in parts:
            if part.capacity != capacity:
                raise EvidenceError(
                    f"groups of at most {capacity} and of at most {part.capacity} tokens "
                    "come from two plans"
                )
        return cls(
            capacity,
            sum(p.launched for p in parts),
            tuple(t for p in parts for t in p.total_G),
            tuple(t for p in parts for t in p.tokens_G),
            tuple(t for p in parts for t in p.missing_G),
        )

    @property
    def n(self) -> int:
        """Prompt groups that met the slice."""
        return len(self.tokens_G)

    @property
    def missing(self) -> int:
        """Tokens without a value."""
        return sum(self.missing_G)

    @property
    def tokens(self) -> int:
        return sum(self.tokens_G)

    @property
    def mean(self) -> float:
        """Token-weighted mean of what was measured; NaN where nothing was."""
        return math.fsum(self.total_G) / self.tokens if self.tokens else math.nan

    def _z(self, limit: float, missing_as: float) -> Floats:
        total_G, missing_G = np.array(self.total_G), np.array(self.missing_G)
        tokens_G = np.array(self.tokens_G) + missing_G
        z_G = limit + (total_G + missing_as * missing_G - limit * tokens_G) / self.capacity
        return np.clip(z_G, 0.0, 1.0)

    def below_growth(self, limit: float) -> Floats:
        """log e-value of each NEG component against "the mean is `limit` or more"."""
        z_G = self._z(limit, missing_as=1.0)
        return np.log1p(NEG[:, None] * z_G).sum(axis=1) - self.n * np.log1p(NEG * limit)

    def above_growth(self, limit: float) -> Floats:
        """log e-value of each POS component against "the mean is `limit` or less"."""
        z_G = self._z(limit, missing_as=0.0)
        return np.log1p(POS[:, None] * z_G).sum(axis=1) - self.n * np.log1p(POS * limit)

    def log_e_below(self, limit: float) -> float:
        """Evidence that the mean is below the limit, in nats; increases with the limit."""
        return log_mean_exp(self.below_growth(limit))

    def log_e_above(self, limit: float) -> float:
        """Evidence that the mean is above the limit, in nats; decreases with the limit."""
        return log_mean_exp(self.above_growth(limit))
