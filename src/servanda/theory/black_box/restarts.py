# Restarts: evidence that something changed at some time, however long nothing did before.
#
# A product of factors of mean at most 1 falls for as long as nothing changes, and a later change
# has to earn that back.  Here each alternative begins at every closed beat k, with the weight
# 1 / (k (k + 1)), and counts as 1 before: the weighted sum is a mixture of test martingales, so
# that all evaluations together exceed 1 / alpha with a probability of at most alpha (Ville).  A
# change after k beats costs about 2 log k nats.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from servanda.theory.stats.bets import Floats, log_mean_exp
from servanda.theory.stats.multiplicity import step_alpha
from servanda.theory.stats.refutation import LEAK


@dataclass(frozen=True)
class Restarts:
    """Evidence against "nothing has changed".

    Args:
        growth: log of the weighted sum over the beats at which each alternative began, nats.
        beats: number of beats that have begun; n: units; missing: units without a value.
    """

    growth: tuple[float, ...]
    beats: int = 0
    n: int = 0
    missing: int = 0

    @classmethod
    def of(cls, alternatives: int) -> Restarts:
        """Without data."""
        return cls((-math.inf,) * alternatives)

    def begin(self) -> Restarts:
        """A beat begins: what follows may be after the change."""
        own = math.log(step_alpha(1.0, self.beats + 1))
        growth = np.logaddexp(self.growth, own)
        return replace(self, growth=tuple(growth.tolist()), beats=self.beats + 1)

    def after(self, log_factor_J: Floats) -> Restarts:
        """One unit more, with the log of each alternative's factor, nats."""
        growth = np.array(self.growth) + log_factor_J
        return replace(self, growth=tuple(growth.tolist()), n=self.n + 1)

    def lost(self) -> Restarts:
        """One unit without a value, which is charged the smallest possible factor."""
        lost = self.after(np.full(len(self.growth), math.log(LEAK)))
        return replace(lost, n=self.n, missing=self.missing + 1)

    @property
    def log_e(self) -> float:
        """Evidence of a change, nats."""
        later = -math.log(self.beats + 1)  # the weight of all beats to come
        return (
            float(np.logaddexp(log_mean_exp(np.array(self.growth)), later)) if self.beats else 0.0
        )
