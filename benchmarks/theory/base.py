# Falsification: a theorem against exact values, on cases that try to break it.
#
# A challenge makes kernels small enough to enumerate, some random and some optimised towards the
# bound, and returns the exact value and its bound.  No number here is an estimate: a value that
# exceeds its bound by more than rounding is a defect.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from servanda.registry import Registry
from servanda.theory.bounds.theorem import THEOREMS

Floats = NDArray[np.float64]
Sense = Literal["at most", "at least", "equal"]

_RELATIVE, _ABSOLUTE = 1e-9, 1e-12  # rounding of float64 sums over small vocabularies
_TELLING = 1e-8  # of smaller bounds rounding would decide how tight they are


@dataclass(frozen=True)
class Trial:
    """Exact values, and the theorem's bound on each, [N].

    Args:
        sense: the exact value is "at most", "at least" or "equal" to the bound.
        what: of the cases, such as "two-level drift"; printed with a violation.
        side: whether it tests a part or a lemma instead of the theorem: a violation counts, the
            tightness does not.
    """

    exact: Floats
    bound: Floats
    sense: Sense = "at most"
    what: str = ""
    side: bool = False

    @property
    def violated_N(self) -> NDArray[np.bool_]:
        # a bound without end has no rounding, and inf - inf would be no number
        finite_N = np.where(np.isfinite(self.bound), self.bound, 0.0)
        slack_N = _ABSOLUTE + _RELATIVE * np.maximum(np.abs(self.exact), np.abs(finite_N))
        over_N = self.exact > self.bound + slack_N
        under_N = self.exact + slack_N < self.bound
        return {"at most": over_N, "at least": under_N, "equal": over_N | under_N}[self.sense]

    @property
    def tightness_N(self) -> Floats:
        """Exact over bound, or bound over exact for a lower bound; where both are positive."""
        small, large = self.exact, self.bound
        if self.sense == "at least":
            small, large = large, small
        meaningful = (large > _TELLING) & np.isfinite(large)
        return small[meaningful] / large[meaningful]


Challenge = Callable[[np.random.Generator, int], Iterator[Trial]]
CHALLENGES: Registry[Challenge] = Registry("challenge")


def challenge(theorem: str) -> Callable[[Challenge], Challenge]:
    """Register what tries to break a theorem: (rng, about how many cases) -> trials.

    Raises:
        ValueError: there is no such theorem.
    """
    if theorem not in THEOREMS:
        raise ValueError(f"no theorem is named {theorem!r}: {THEOREMS.hint(theorem)}")
    return CHALLENGES.register(theorem)


@dataclass(frozen=True)
class Tightness:
    """What a challenge found.

    Args:
        cases: how many exact values; violations: how many of them break the theorem.
        tightest: the largest exact / bound of what the theorem states, side trials left out;
            1.0 where some case attains it.
        typical: the median of exact / bound over the same cases.
        worst: what the cases were among which a violation was found, "" where none was.
    """

    theorem: str
    cases: int
    violations: int
    tightest: float
    typical: float
    worst: str = ""


def falsify(theorem: str, rng: np.random.Generator, cases: int) -> Tightness:
    """Put one theorem to its challenge."""
    trials = [*CHALLENGES[theorem](rng, cases)]
    broken = [trial for trial in trials if trial.violated_N.any()]
    own = [trial.tightness_N for trial in trials if not trial.side]
    ratios = np.concatenate([np.zeros(0), *own])
    return Tightness(
        theorem,
        cases=sum(len(trial.exact) for trial in trials),
        violations=sum(int(trial.violated_N.sum()) for trial in broken),
        tightest=float(ratios.max(initial=0.0)),
        typical=float(np.median(ratios)) if len(ratios) else 0.0,
        worst=broken[0].what if broken else "",
    )
