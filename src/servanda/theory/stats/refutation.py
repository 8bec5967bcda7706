# Refutation: evidence that can only reject.
#
# Each alternative to a hypothesis is a product of factors, one per token, whose mean given
# everything earlier is at most 1 under the hypothesis.  So is the mean of the products, at all
# evaluations simultaneously (Ville).  A lost token is charged the smallest possible factor: for any
# reason of the loss, the product is then smaller.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from servanda.theory.stats.bets import log_mean_exp

LEAK = 0.05  # share of 1 (the hypothesis itself) in every factor, so none is smaller than this
SLACK = 1e-6  # smallest error, nats: logprobs may have been float32 before they were recorded
R = TypeVar("R", bound="Refutation")


@dataclass(frozen=True)
class Refutation:
    """Evidence against a hypothesis; `+` adds later closed rounds.

    Args:
        n: tokens with a value; missing: dispatched tokens without one.
        growth: log of each alternative's product, nats; () without data.
    """

    n: int = 0
    growth: tuple[float, ...] = ()
    missing: int = 0

    def __add__(self: R, other: Refutation) -> R:
        parts = [growth for growth in (self.growth, other.growth) if growth]
        return replace(
            self,
            n=self.n + other.n,
            # a round may lack the last alternatives, which count as no bet
            growth=tuple(map(math.fsum, zip_longest(*parts, fillvalue=0.0))),
            missing=self.missing + other.missing,
        )

    @property
    def log_e(self) -> float:
        """Evidence against the hypothesis, in nats."""
        return log_mean_exp(np.array(self.growth)) if self.n else -math.inf
