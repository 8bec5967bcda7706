# Answer classes: bets on which of a few texts answers a request, against a reference.
#
# The reference is exact probabilities, or draws.  Against draws, the rank of a new answer among all
# earlier ones and itself, with ties drawn at random, is uniform on [0, 1) and independent of the
# earlier ranks if reference and endpoint draw from one distribution, whichever it is (conformal
# prediction): the uncertainty of the reference is part of the test.  A bet is a density on the
# classes, or on bins of ranks, that is fixed before the answer.
# Axes: J alternatives, K classes; the last class is any other text.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from servanda.theory.stats.bets import Floats
from servanda.theory.stats.refutation import LEAK

STRENGTHS = np.array([2.0, 6.0, 20.0, 60.0])  # answers that the reference counts as, in a bet
RATES = np.array([0.05, 0.2, 0.5, 0.95])  # of answers in the last class
_KEPT = 0.97  # weight of what was learned, one answer later
_FLOOR = 1e-3  # share of equal probabilities in the reference, so that none is 0


@dataclass(frozen=True)
class AnswerClasses:
    """One request: the reference distribution of its answers, and what its bets have learned.

    Args:
        exact: reference probabilities, [K]; () where only draws are known.
        counts: draws of the reference and later answers, [K]; () where the former are exact.
        learned: later answers by class or bin, the last ones most, [K].

    >>> AnswerClasses.of_draws((7, 3, 0)).widths.round(2).tolist()
    [0.64, 0.27, 0.09]
    """

    exact: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    learned: tuple[float, ...] = ()

    @classmethod
    def of_probabilities(cls, p_K: tuple[float, ...]) -> AnswerClasses:
        return cls(exact=p_K, learned=(0.0,) * len(p_K))

    @classmethod
    def of_draws(cls, count_K: tuple[int, ...]) -> AnswerClasses:
        return cls(counts=count_K, learned=(0.0,) * len(count_K))

    @property
    def widths(self) -> Floats:
        """Probability of each class, or width of each bin of ranks, [K]; of sum 1."""
        if self.exact:
            return (1 - _FLOOR) * np.array(self.exact) + _FLOOR / len(self.exact)
        count_K = np.array(self.counts, dtype=np.float64)
        count_K[-1] += 1  # a text that the reference never gave
        count_K += _FLOOR
        return count_K / count_K.sum()

    def place(self, answer: int, v: float) -> int:
        """The class of an answer, or the bin of its rank.

        Args:
            v: a fresh uniform, which breaks ties.
        """
        if self.exact:
            return answer
        before, own = sum(self.counts[:answer]), self.counts[answer] + 1
        u = (before + v * own) / (sum(self.counts) + 1)
        inner = np.cumsum(self.widths)[:-1]
        return int(np.searchsorted(inner, u, side="right"))

    def log_factors(self, place: int, tolerance: float = 0.0) -> Floats:
        """log factor of each strength of the learned bet, nats, [J].

        Args:
            tolerance: total variation from exact probabilities that is no change: the factor has
                a mean of at most 1 for every distribution within it.
        """
        width_K, seen_K = self.widths, np.array(self.learned)
        strength_J1 = STRENGTHS[:, None]
        density_JK = (strength_J1 * width_K + seen_K) / ((strength_J1 + seen_K.sum()) * width_K)
        return self._log_factor(density_JK, place, tolerance if self.exact else 0.0)

    def log_rate_factors(self, place: int) -> Floats:
        """log factor of bets on the last of two classes, of RATES or more often, nats, [J]."""
        first, last = self.widths
        rate_J = np.maximum(RATES, last)
        return self._log_factor(np.stack([(1 - rate_J) / first, rate_J / last], 1), place, 0.0)

    def after(self, answer: int, place: int) -> AnswerClasses:
        """One answer later."""
        learned_K = _KEPT * np.array(self.learned)
        learned_K[place] += 1
        counts = tuple(n + (k == answer) for k, n in enumerate(self.counts))
        return replace(self, counts=counts, learned=tuple(learned_K.tolist()))

    def _log_factor(self, density_JK: Floats, place: int, tolerance: float) -> Floats:
        factor_JK = (1 - LEAK) * density_JK + LEAK
        # E_q f <= E_p f + TV(p, q) (max f - min f), and E_p f <= 1 / (1 - floor)
        spread_J = factor_JK.max(axis=1) - factor_JK.min(axis=1)
        floor = math.log1p(-_FLOOR) if self.exact else 0.0
        return np.log(factor_JK[:, place]) - np.log1p(tolerance * spread_J) + floor
