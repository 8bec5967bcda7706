# Alpha: every division of an error probability among decisions that can each be wrong.
#
# The parts of a whole add up to at most the whole, so any decision is wrong with at most this
# probability (the union bound): `shared` for a number that is known before, and for one that is
# not a series, whose numbers begin at 1.  Nothing is divided where all of several tests have to
# agree: a contract holds wrongly only if the test of a slice that exceeds its limit errs.
#
# A part is the largest p-value that rejects, and 1 / part the least e-value (`log_price`).

from __future__ import annotations

import math

_FIRST = 0.9  # share of the first attempt: most runs need no other


def shared(alpha: float, among: int) -> float:
    """The equal share of each of several decisions, of which any may err; all of it for none."""
    return alpha / max(among, 1)


def attempt_alpha(alpha: float, attempt: int) -> float:
    """The share of an attempt: 9/10 for the first, and of the rest 1 / ((r - 1) r) for the r-th.

    Raises:
        ValueError: the first attempt is 1.
    """
    if attempt < 1:
        raise ValueError(f"the first attempt is number 1, not {attempt}")
    return alpha * _FIRST if attempt == 1 else look_alpha(alpha * (1 - _FIRST), attempt - 1)


def step_alpha(alpha: float, step: int) -> float:
    """The share of a training step in that of all steps of a run: 2 / ((t + 1)(t + 2))."""
    return alpha * 2 / ((step + 1) * (step + 2))


def look_alpha(alpha: float, look: int) -> float:
    """The share of one of any number of evaluations: 1 / (k (k + 1)), half for the first.

    >>> look_alpha(0.05, 1), round(sum(look_alpha(0.05, k) for k in range(1, 10**5)), 4)
    (0.025, 0.05)
    """
    return alpha / (look * (look + 1))


def next_look(part: float, look: int) -> float:
    """The share of the evaluation after this one, from its own."""
    return part * look / (look + 2)


def log_price(alpha: float) -> float:
    """The log e-value that rejects with an error probability of at most alpha (Ville), nats."""
    return math.log(1 / alpha)


def log_shared(among: int) -> float:
    """How much more log evidence each of several decisions needs than one alone, nats."""
    return math.log(max(among, 1))
