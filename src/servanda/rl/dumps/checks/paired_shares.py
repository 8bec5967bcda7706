# Whether a difference of two shares is above 0 on average, with an error probability.
#
# One difference for each sequence, between -1 and 1.  If its mean is 0 or less, whatever the other
# sequences are, 1 + b d has a mean of at most 1 for each b in [0, 1), so the product over sequences
# exceeds 1/a with a probability of at most a, whatever the distribution.  The mean of the products
# over fixed b has that property, too.  The tokens of a sequence depend on each other.  Answers to
# one prompt do not, given the prompt, so a prompt that neighbours share counts in the first alone.
# Axes: N tokens, S sequences, B bets.

from __future__ import annotations

import math

import numpy as np

from servanda.theory.stats.bets import log_mean_exp
from servanda.traces.rollouts import Array, Rollouts

ERROR = 1e-4  # probability that a check names what is not there, over all its lags
_BETS = np.geomspace(0.01, 0.99, 16)


def growths(difference_S: Array) -> Array:
    """The sum over sequences of the growth of each bet on a mean above 0, [B]; NaN counts as 0."""
    known_S = np.nan_to_num(difference_S)
    return np.log1p(_BETS[:, None] * known_S).sum(axis=1)


def nothing(*shape: int) -> Array:
    """Growths without a sequence, [..., B]."""
    return np.zeros((*shape, len(_BETS)))


def chance(growth_B: Array) -> float:
    """At most the probability of such growths if the mean is 0 or less.

    Source:
        I. Waudby-Smith, A. Ramdas, Estimating means of bounded random variables by betting, 2024.

    >>> chance(nothing())
    1.0
    """
    return math.exp(-max(log_mean_exp(growth_B), 0.0))


def told_before(rollouts: Rollouts) -> Array:
    """Whether a token is of a prompt that the sequence before has, too, [N]."""
    names = rollouts.group_S
    again_S = np.array([a == b for a, b in zip(names, ("", *names), strict=False)], dtype=bool)
    again_S[:1] = False
    at_N = np.arange(len(rollouts.token_N)) - np.repeat(rollouts.start_S, rollouts.length_S)
    return again_S[rollouts.sequence_N] & (at_N < rollouts.prompt_tokens_S[rollouts.sequence_N])


def share(part_S: Array, whole_S: Array) -> Array:
    """A share, NaN of nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return part_S / whole_S
