# GroupRatio: evidence about a token-weighted mean over a population of prompt groups.
#
# The estimand is E[sum of x over the slice's tokens] / E[tokens in the slice], for a random prompt
# group.  It is below m exactly when E Z < m for
#     Z = m + sum (x_t - m) / capacity   in [0, 1],
# capacity = the largest number of slice tokens of any group, fixed in the plan.  Z depends on m, so
# (sum of x, tokens) is stored for each group.  A mean of per-sequence means would be a different,
# wrong number: lengths are random and correlated with the divergence.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import NEG, POS, Floats
from servanda.theory.stats.log_moment import Process


@dataclass(frozen=True, eq=False)
class GroupRatio(Process):
    """Per prompt group of a slice: sum of x, tokens with a value, tokens without.

    Groups without a token in the slice do not change any result; they are counted (`launched`) but
    not stored.  A missing token counts as x = 1 for `holds` and as x = 0 for `violated`.
    """

    capacity: int
    launched: int = 0
    total_G: Floats = field(default_factory=lambda: np.zeros(0))
    tokens_G: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    missing_G: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        total_G, tokens_G, missing_G = self.total_G, self.tokens_G, self.missing_G
        # tolerance for rounding of a sum of ones
        right_G = (total_G >= 0.0) & (total_G <= tokens_G * (1 + 1e-12))
        right_G &= tokens_G + missing_G <= self.capacity
        if not right_G.all():
            g = int(np.flatnonzero(~right_G)[0])
            raise EvidenceError(
                f"a prompt group has sum {total_G[g]} over {tokens_G[g]} tokens and "
                f"{missing_G[g]} missing ones, with room for {self.capacity}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupRatio) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        """Every digit of every group, because the evidence digest is computed from it."""
        parts = [a.tolist() for a in (self.total_G, self.tokens_G, self.missing_G)]
        return f"GroupRatio({self.capacity}, {self.launched}, {', '.join(map(str, parts))})"

    @classmethod
    def join(cls, capacity: int, parts: Sequence[GroupRatio]) -> GroupRatio:
        """Merge disjoint rounds of one plan."""
        for part in parts:
            if part.capacity != capacity:
                raise EvidenceError(
                    f"groups of at most {capacity} and of at most {part.capacity} tokens "
                    "come from two plans"
                )
        if not parts:
            return cls(capacity)
        return cls(
            capacity,
            sum(p.launched for p in parts),
            np.concatenate([p.total_G for p in parts]),
            np.concatenate([p.tokens_G for p in parts]),
            np.concatenate([p.missing_G for p in parts]),
        )

    @property
    def n(self) -> int:  # type: ignore[override]
        """Prompt groups that met the slice."""
        return len(self.tokens_G)

    @cached_property
    def missing(self) -> int:
        """Tokens without a value."""
        return int(self.missing_G.sum())

    @cached_property
    def known(self) -> int:
        """Tokens with a value."""
        return int(self.tokens_G.sum())

    @cached_property
    def total(self) -> float:
        """Sum of x over them."""
        return math.fsum(self.total_G.tolist())

    @property
    def mean(self) -> float:
        """Token-weighted mean of the known values; NaN without any."""
        return self.total / self.known if self.known else math.nan

    def _z(self, limit: float, missing_as: float) -> Floats:
        tokens_G = self.tokens_G + self.missing_G
        excess_G = self.total_G + missing_as * self.missing_G - limit * tokens_G
        return np.clip(limit + excess_G / self.capacity, 0.0, 1.0)

    def below_growth(self, limit: float) -> Floats:
        z_G = self._z(limit, missing_as=1.0)
        return np.log1p(NEG[:, None] * z_G).sum(axis=1) - self.n * np.log1p(NEG * limit)

    def above_growth(self, limit: float) -> Floats:
        z_G = self._z(limit, missing_as=0.0)
        return np.log1p(POS[:, None] * z_G).sum(axis=1) - self.n * np.log1p(POS * limit)
