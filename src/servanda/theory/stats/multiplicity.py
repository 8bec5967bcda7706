# Multiplicity: error control over many hypotheses.
#
# A promotion that needs every slice to hold needs no split of alpha: if one slice exceeds its
# limit, its own test must err.  Decisions per attempt or per step need one, defined here.

from __future__ import annotations

_FIRST = 0.9  # share of the first attempt: most runs need no other


def attempt_alpha(alpha: float, attempt: int) -> float:
    """The share of alpha of an attempt; all attempts together use alpha once.

    The first has 9/10, and the r-th 1 / (10 (r - 1) r), which adds up to 1/10 over r = 2, 3, ...:
    repeated attempts do not increase the error.

    Raises:
        ValueError: the first attempt is 1.
    """
    _counted(attempt, "attempt")
    if attempt == 1:
        return alpha * _FIRST
    return alpha * (1 - _FIRST) / ((attempt - 1) * attempt)


def step_alpha(alpha: float, step: int) -> float:
    """The share of alpha of one training step; a run of any length uses alpha once.

    1 / (t (t + 1)) adds up to 1 over t = 1, 2, ...  If alpha is instead the long-run share of wrong
    steps, each step uses all of it.

    Raises:
        ValueError: the first step is 1.
    """
    _counted(step, "step")
    return alpha / (step * (step + 1))


def _counted(number: int, noun: str) -> None:
    if number < 1:
        raise ValueError(f"the first {noun} is number 1, not {number}")
