# Tails: whether a few tokens or responses are further off than the noise of the others can give.
#
# A mean over tokens bounds each of them by 1, so what is rare vanishes in it.  This test needs no
# share.  It asks whether the tail falls: of what differs by more than a nats, noise reaches 4 a at
# most once in 16.  That holds of every tail that falls at least as the square of the size, which
# normal, Laplace and Student noise from two degrees of freedom on do, and a second population, of
# answers to another prompt or ids that one side calls impossible, does not.
#
# Of each pair of levels "one in 16" is the mean of a variable in {0, 1}, whatever came before, so
# LogMoment's bets apply: the mean of the e-values of all pairs is an e-value.

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import POS, log_mean_exp, mixed, weights_above

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOKEN_NATS = (1.0, 4.0, 16.0)  # levels of |log p - log q| of a token
RESPONSE_NATS = (0.125, 0.5, 2.0)  # levels of its mean over a response
LEAST = 16  # tokens of a response whose mean counts: of fewer, a mean has the tail of a token
STEP = 4.0  # of neighbouring levels
FAR = TOKEN_NATS[1]
ALPHA = 0.001  # probability that noise with such a tail is ever called anything else
KEPT = 8  # responses that are told


@dataclass(frozen=True, order=True)
class FarToken:
    """The token of a response that is furthest off.

    Args:
        size: |log p - log q|, nats, may be infinite; above: tokens of the response beyond FAR.
        step: of the trainer; -1: none.  source, group: its response and prompt group.
        at: its index among the tokens of the response, the prompt included; -1: unknown.
        token: its id; -1: unknown.  train, infer: both logprobs.
    """

    size: float
    above: int
    step: int
    source: str
    group: str
    at: int
    token: int
    train: float
    infer: float

    def __str__(self) -> str:
        """
        >>> print(FarToken(44.8, 3, 7, "rollouts.jsonl:17", "p3", 41, 1234, -45.0, -0.2))
        step 7, rollouts.jsonl:17, token 41 (id 1234): train -45, infer -0.2
        """
        step = f"step {self.step}, " if self.step >= 0 else ""
        at = f", token {self.at}" if self.at >= 0 else ""
        name = f" (id {self.token})" if self.token >= 0 else ""
        return f"{step}{self.source}{at}{name}: train {self.train:.3g}, infer {self.infer:.3g}"


@dataclass(frozen=True)
class Tails:
    """How many tokens and responses are beyond each level; `+` adds disjoint ones.

    Args:
        tokens: usable ones; beyond: of these, those beyond each of TOKEN_NATS.
        responses: those with a usable token; odd: of these, those beyond each of RESPONSE_NATS on
            their mean; far: of these, those with a token beyond FAR.
        worst: the responses with the furthest tokens, furthest first.
    """

    tokens: int = 0
    beyond: tuple[int, ...] = (0,) * len(TOKEN_NATS)
    responses: int = 0
    odd: tuple[int, ...] = (0,) * len(RESPONSE_NATS)
    far: int = 0
    worst: tuple[FarToken, ...] = ()

    def __add__(self, other: Tails) -> Tails:
        return Tails(
            self.tokens + other.tokens,
            tuple(map(sum, zip(self.beyond, other.beyond, strict=True))),
            self.responses + other.responses,
            tuple(map(sum, zip(self.odd, other.odd, strict=True))),
            self.far + other.far,
            # places break ties, so that the order of parts does not matter
            tuple(heapq.nlargest(KEPT, (*self.worst, *other.worst))),
        )

    @property
    def pairs(self) -> tuple[tuple[str, float, float, int, int], ...]:
        """(unit, level, level further out, number beyond the first, beyond the second)."""
        found = []
        for unit, levels, counts in (
            ("token", TOKEN_NATS, self.beyond),
            ("response", RESPONSE_NATS, self.odd),
        ):
            ends = [(i, j) for j in range(len(levels)) for i in range(j)]
            found += [(unit, levels[i], levels[j], counts[i], counts[j]) for i, j in ends]
        return tuple(found)

    @property
    def log_e(self) -> float:
        """Evidence that the tail does not fall, in nats."""
        return log_mean_exp(np.array([_log_e(*pair[1:]) for pair in self.pairs]))

    @property
    def clearest(self) -> tuple[str, float, float, int, int]:
        """The pair of levels with the most evidence."""
        return max(self.pairs, key=lambda pair: _log_e(*pair[1:]))


def falls(near: float, far: float) -> float:
    """The largest share of what is beyond `near` that noise takes beyond `far`.

    >>> falls(1.0, 4.0), falls(1.0, 16.0)
    (0.0625, 0.00390625)
    """
    return (near / far) ** 2


def _log_e(near: float, far: float, beyond_near: int, beyond_far: int) -> float:
    """Evidence that more than `falls` of those beyond `near` are beyond `far`, nats."""
    share = falls(near, far)
    growth = beyond_far * np.log1p(POS) - beyond_near * np.log1p(POS * share)
    return mixed(growth, weights_above(share))


def counted(size_N: Floats, levels: tuple[float, ...]) -> tuple[int, ...]:
    """The number beyond each level; NaN is beyond none."""
    return tuple(int(np.count_nonzero(size_N > level)) for level in levels)


def finds(log_e: float, part: float = 1.0) -> bool:
    """Whether the evidence is past the price of a finding.

    Args:
        part: share of ALPHA for this decision.
    """
    return log_e >= math.log(1 / (ALPHA * part))
