# Tails: whether a few tokens or responses are further off than the noise of the others can give.
#
# A mean over tokens bounds each of them by 1, so what is rare vanishes in it.  This test needs no
# share.  It asks whether the tail falls: of the tokens that differ by more than 1 nat, noise takes
# at most one in 16 beyond 4.  That holds of every tail that falls at least as the square of the
# size, as normal, Laplace and Student noise from two degrees of freedom on do.  It does not hold
# of a second population: answers to another prompt, or ids that one side calls impossible.
#
# Lower levels are compared with far ones only: a healthy mixture of experts has a second
# population, of tokens that it routes to other experts, which differ by about a nat.
#
# Of each pair of levels the share is the mean of a variable in {0, 1}, whatever came before, so
# bets against it are e-processes, and so is the mean of those of all pairs.  A pair whose near
# level is not in the tail, but in the body of the noise, counts as 0, which only lessens it.

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import log_mean_exp

Floats = NDArray[np.float64]

# levels of |log p - log q|, nats: (near, far) of a token, and of its mean over a response
TOKEN_PAIRS = ((1.0, 4.0), (4.0, 16.0), (0.25, 8.0), (0.0625, 16.0))
RESPONSE_PAIRS = ((0.03125, 0.125), (0.0625, 0.25), (0.125, 0.5), (0.5, 2.0))
TOKEN_NATS, RESPONSE_NATS = (
    tuple(sorted({level for pair in pairs for level in pair}))
    for pairs in (TOKEN_PAIRS, RESPONSE_PAIRS)
)
# times the share that noise takes beyond the far level, at most
_BETS = np.array([1e-4, 1e-3, 0.01, 0.1, 1.0, 8.0])
_BODY = 0.1  # a level that more of the tokens, or responses, are beyond is in the body of the noise
LEAST = 16  # tokens of a response whose mean counts: of fewer, a mean has the tail of a token
FAR = 4.0
ALPHA = 0.001  # probability that noise with such a tail is ever called anything else
DOUBT = 0.1  # probability below which noise would rarely give it
_MANY, _SIGMAS = 100, 1.2816  # a mean from which on counts are normal, and their quantile of DOUBT
KEPT = 8  # responses that are told


@dataclass(frozen=True, order=True)
class FarToken:
    """The token of a response that is furthest off.

    Args:
        size: |log p - log q|, nats, may be infinite.
        step: of the trainer; -1: none.  source: the place of its response.
        at: its index among the tokens of the response, the prompt included; -1: unknown.
        token: its id; -1: unknown.  train, infer: both logprobs.
    """

    size: float
    step: int
    source: str
    at: int
    token: int
    train: float
    infer: float

    def __str__(self) -> str:
        """
        >>> print(FarToken(44.8, 7, "rollouts.jsonl:17", 41, 1234, -45.0, -0.2))
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
    worst: tuple[FarToken, ...] = field(default=(), repr=False)  # a place is no part of a digest

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
        tokens = dict(zip(TOKEN_NATS, self.beyond, strict=True))
        responses = dict(zip(RESPONSE_NATS, self.odd, strict=True))
        return (
            *(("token", a, b, tokens[a], tokens[b]) for a, b in TOKEN_PAIRS),
            *(("response", a, b, responses[a], responses[b]) for a, b in RESPONSE_PAIRS),
        )

    @property
    def log_e(self) -> float:
        """Evidence that the tail does not fall, in nats."""
        return log_mean_exp(np.array([0.0, *map(self._evidence, self.pairs)]))

    @property
    def clearest(self) -> tuple[str, float, float, int, int]:
        """The pair of levels with the most evidence."""
        return max(self.pairs, key=self._evidence)

    @property
    def doubtful(self) -> bool:
        """Whether noise with such a tail would rarely give what is furthest off.

        Less than a finding: one token far from all others may be either.
        """
        pairs = (pair for pair in self.pairs if pair[-1] and not self._in_body(pair))
        return any(_rare(n, k, falls(near, far)) for _, near, far, n, k in pairs)

    def _in_body(self, pair: tuple[str, float, float, int, int]) -> bool:
        unit, _, _, n, _ = pair
        return n > _BODY * (self.tokens if unit == "token" else self.responses)

    def _evidence(self, pair: tuple[str, float, float, int, int]) -> float:
        """The evidence of a pair of levels, nats; that of betting nothing is 0."""
        return -math.inf if self._in_body(pair) else _log_e(*pair[1:])


def falls(near: float, far: float) -> float:
    """The largest share of what is beyond `near` that noise takes beyond `far`.

    >>> falls(1.0, 4.0), falls(1.0, 16.0)
    (0.0625, 0.00390625)
    """
    return (near / far) ** 2


def _log_e(near: float, far: float, beyond_near: int, beyond_far: int) -> float:
    """Evidence that more than `falls` of those beyond `near` are beyond `far`, nats."""
    bet = _BETS / falls(near, far)
    return log_mean_exp(beyond_far * np.log1p(bet) - beyond_near * np.log1p(_BETS))


def _rare(n: int, k: int, share: float) -> bool:
    """Whether k or more of n have a probability below DOUBT, if each has this share."""
    mean = n * share
    if mean > _MANY:
        return k > mean + _SIGMAS * math.sqrt(mean)  # as for a normal variable
    term = below = (1 - share) ** n
    for i in range(min(k - 1, n)):
        term *= (n - i) / (i + 1) * share / (1 - share)
        below += term
        if below > 1 - DOUBT:
            return True
    return 1 - below < DOUBT


def counted(size_N: Floats, levels: tuple[float, ...]) -> tuple[int, ...]:
    """The number beyond each level; NaN is beyond none."""
    return tuple(int(np.count_nonzero(size_N > level)) for level in levels)


def finds(log_e: float, part: float = 1.0) -> bool:
    """Whether the evidence is past the threshold of a finding.

    Args:
        part: share of ALPHA for this decision.
    """
    return log_e >= math.log(1 / (ALPHA * part))
