# Multiplicity: many questions, one promise about all their answers.
#
# A promotion that needs every slice to hold splits nothing: if one slice does not keep its
# limit, its own test must err.  What is decided try by try or step by step does, and it is said
# here once how.

from __future__ import annotations


def attempt_alpha(alpha: float, attempt: int) -> float:
    """What a fresh attempt may spend, so that all attempts together spend alpha once.

    1 / (r (r + 1)) adds up to 1 over r = 1, 2, ...: to try until it is green does not pay.

    Raises:
        ValueError: the first attempt is 1.
    """
    return alpha / _telescope(attempt, "attempt")


def step_alpha(alpha: float, step: int) -> float:
    """What one training step may spend, so that a run of any length spends alpha once.

    Where alpha is to be the long-run share of wrong steps instead, each step spends all of it.

    Raises:
        ValueError: the first step is 1.
    """
    return alpha / _telescope(step, "step")


def _telescope(number: int, noun: str) -> int:
    if number < 1:
        raise ValueError(f"the first {noun} is number 1, not {number}")
    return number * (number + 1)
