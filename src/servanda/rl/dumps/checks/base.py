# The interface of a data quality check: it gets every chunk once, and returns one finding.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from servanda.registry import Registry
from servanda.traces.rollouts import Array, Rollouts

HEAD_TOKENS = 3  # tokens at the beginning of a turn, affected by tool boundaries
LEAST, TIMES, MOST = 5, 10, 0.3  # of one step among others: see `of_step`

State = Literal["ok", "warning", "unsound"]


@dataclass(frozen=True)
class Finding:
    """The finding of a check.

    Args:
        check: its name.
        state: unsound data cannot be evidence; a warning is for the reader.
        text: one sentence, with its numbers.
        numbers: the same, for programs.
        first: place of the first affected sequence; "" if none.
        odd: if a share decides: number of odd tokens or sequences, total number, and accepted
            share; None if a single one makes the data unsound.
    """

    check: str
    state: State
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    first: str = ""
    odd: tuple[int, int, float] | None = None

    @property
    def placed(self) -> str:
        """The text, with the place of the first odd item."""
        place = f" (first: {self.first})" if self.first and self.state != "ok" else ""
        return self.text + place


def errors_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The reasons why data cannot be evidence; empty if it can."""
    return tuple(finding.placed for finding in findings if finding.state == "unsound")


def of_step(finding: Finding, run: tuple[int, int] = (0, 0)) -> Finding:
    """The finding for one step among others.

    A few odd items in a few hundred do not make a step unsound; the accepted share applies to the
    whole run.  A step is unsound from ten times that share, or 30 %, and at least five items.

    Args:
        run: (odd, total) of the steps so far, including this one, if the whole run is not checked
            elsewhere.
    """
    if finding.state != "unsound" or finding.odd is None:
        return finding
    odd, whole, most = finding.odd
    broken = odd >= LEAST and odd > min(TIMES * most, MOST) * whole
    often = run[0] >= LEAST and run[0] > most * run[1]
    return finding if broken or often else replace(finding, state="warning")


class Check(Protocol):
    """A check over the chunks of a dump in order, which stores only sums."""

    def add(self, rollouts: Rollouts) -> None: ...

    def finding(self) -> Finding: ...


CHECKS: Registry[Callable[[], Check]] = Registry("check of a dump")
C = TypeVar("C", bound=Callable[[], Check])


def check(name: str) -> Callable[[C], C]:
    return CHECKS.register(name)  # type: ignore[return-value]


class FirstPlace:
    """The place of the first affected sequence."""

    def __init__(self) -> None:
        self.place = ""

    def add(self, rollouts: Rollouts, flag_N: Array) -> None:
        """Record the sequence of the first flagged token, unless one is recorded."""
        if flag_N.any():
            self.place = self.place or rollouts.source_S[rollouts.sequence_N[flag_N.argmax()]]


def share(part: int, whole: int) -> float:
    """A share of tokens; NaN without tokens."""
    return part / whole if whole else float("nan")


def heads(rollouts: Rollouts) -> Array:
    """Mask of the first tokens of second and later turns, [N]."""
    return (rollouts.turn_N >= 2) & (rollouts.turn_token_N < HEAD_TOKENS)
