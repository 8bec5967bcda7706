# Searches by a test that may be undecided: the first bad of a list of builds, and the fewest
# settings that make a kernel bad.  An undecided test is taken neither for good nor for bad.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from servanda.errors import MeasurementError

Outcome = Literal["good", "bad", "skip"]


@dataclass(frozen=True)
class Probe:
    """One test.

    Args:
        what: the build, or the settings.
        tokens: that it took; None: not known.
        alpha: probability that its answer is wrong; None: that of the command.
        why: the reason for a skip.
    """

    what: str
    outcome: Outcome
    tokens: int | None = None
    alpha: float | None = None
    why: str = ""


Judge = Callable[[int], Outcome]


def first_bad(builds: Sequence[str], judge: Judge) -> tuple[int, int]:
    """The last build that is good and the first that is bad after it, by halving.

    All builds are good up to one and bad from there: this is assumed, and the two ends are tested.
    Builds between the two were skipped: any of them may be the first bad one.

    Args:
        judge: the outcome of a build by its number.

    Raises:
        MeasurementError: the first is not good, or the last not bad.
    """
    low, high = 0, len(builds) - 1
    for end, wanted in ((low, "good"), (high, "bad")):
        if (outcome := judge(end)) != wanted:
            which = "first" if end == low else "last"
            raise _not_as_named(f"the {which} build, {builds[end]},", wanted, outcome)
    skipped: set[int] = set()
    while open_ := [i for i in range(low + 1, high) if i not in skipped]:
        middle = min(open_, key=lambda i: (abs(2 * i - low - high), i))
        outcome = judge(middle)
        if outcome == "good":
            low = middle
        elif outcome == "bad":
            high = middle
        else:
            skipped.add(middle)
    return low, high


@dataclass(frozen=True)
class FewestSettings:
    """Settings that are bad together.

    Args:
        undecided: those whose removal was not decided: they may be needless.
    """

    settings: tuple[str, ...]
    undecided: tuple[str, ...]


def fewest_settings(
    settings: Sequence[str], judge: Callable[[tuple[str, ...]], Outcome]
) -> FewestSettings:
    """A set of settings that is bad, and not without any one of them (delta debugging, ddmin).

    Nothing is assumed of how settings work together.

    Args:
        judge: the outcome with these settings, in their order, and no others.

    Raises:
        MeasurementError: it is not good without settings, or not bad with all.

    Source:
        A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
    """
    known: dict[tuple[str, ...], Outcome] = {}

    def outcome_of(some: Sequence[str]) -> Outcome:
        key = tuple(some)
        if key not in known:
            known[key] = judge(key)
        return known[key]

    for some, wanted in (((), "good"), (settings, "bad")):
        if (outcome := outcome_of(some)) != wanted:
            which = "the kernel with all settings" if some else "the kernel without settings"
            raise _not_as_named(which, wanted, outcome)
    left, parts = [*settings], 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        chunks = [left[i : i + size] for i in range(0, len(left), size)]
        others = [[s for s in left if s not in chunk] for chunk in chunks]
        if (found := next((c for c in chunks if outcome_of(c) == "bad"), None)) is not None:
            left, parts = found, 2
        elif (found := next((o for o in others if outcome_of(o) == "bad"), None)) is not None:
            left, parts = found, max(parts - 1, 2)
        elif parts < len(left):
            parts = min(2 * parts, len(left))
        else:
            break
    without = {s: tuple(o for o in left if o != s) for s in left}
    unsure = tuple(s for s, rest in without.items() if outcome_of(rest) == "skip")
    return FewestSettings(tuple(left), unsure)


def _not_as_named(which: str, wanted: str, outcome: Outcome) -> MeasurementError:
    says = {"good": "is good", "bad": "is bad", "skip": "is not decided"}[outcome]
    hint = "the difference is not between these two: name other ends"
    if outcome == "skip":
        hint = "raise --sequences, or name an end that can be judged"
    return MeasurementError(f"{which} has to be {wanted}, and it {says}", hint=hint)
