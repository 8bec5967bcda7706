# Whether one of two shares is the larger one in most sequences, with an error probability.
#
# If the first is the larger one with a probability of at most 1/2 in each sequence, the number of
# sequences in which it is has a binomial tail: the sign test.  It needs neither a size nor a
# distribution of the shares.  The tokens of a sequence depend on each other, and count once.
# Answers to one prompt are independent given the prompt, so a prompt that neighbours share counts
# in the first of them alone.
# Axes: N tokens, S sequences.

from __future__ import annotations

import math

import numpy as np

from servanda.traces.rollouts import Array, Rollouts

ERROR = 1e-4  # probability that a check names what is not there, over all its lags


def signs(first_S: Array, second_S: Array) -> Array:
    """Sequences in which the first share is the larger one, and the smaller one, [2].

    Equal ones count as neither, as do those in which one is NaN.
    """
    return np.array([(first_S > second_S).sum(), (first_S < second_S).sum()])


def chance(larger: int, smaller: int) -> float:
    """The probability of so many sequences or more, if each is as likely the larger as the smaller.

    >>> chance(0, 0), chance(2, 0), chance(0, 5)
    (1.0, 0.25, 1.0)
    """
    if not larger:
        return 1.0
    n = larger + smaller
    k_K = np.arange(1, n + 1)
    ways_K = np.cumsum(np.log((n + 1 - k_K) / k_K))[larger - 1 :]  # log of n over k
    return float(np.exp(ways_K - n * math.log(2)).sum())


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
