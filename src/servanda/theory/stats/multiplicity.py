# Multiplicity: error control over many hypotheses.
#
# A promotion that needs every slice to hold needs no split of alpha: if one slice exceeds its
# limit, its own test must err.  Decisions per attempt or per step need one, defined here.

from __future__ import annotations


def attempt_alpha(alpha: float, attempt: int) -> float:
    """The share of alpha of an attempt; all attempts together use alpha once.

    1 / (r (r + 1)) adds up to 1 over r = 1, 2, ...: repeated attempts do not increase the error.

    Raises:
        ValueError: the first attempt is 1.
    """
    return alpha / _telescope(attempt, "attempt")


def step_alpha(alpha: float, step: int) -> float:
    """The share of alpha of one training step; a run of any length uses alpha once.

    If alpha is instead the long-run share of wrong steps, each step uses all of it.

    Raises:
        ValueError: the first step is 1.
    """
    return alpha / _telescope(step, "step")


def _telescope(number: int, noun: str) -> int:
    if number < 1:
        raise ValueError(f"the first {noun} is number 1, not {number}")
    return number * (number + 1)
