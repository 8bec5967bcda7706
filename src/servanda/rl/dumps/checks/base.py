# What a check of a dump is: it sees every chunk once, and says one thing at the end.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from servanda.registry import Registry
from servanda.traces.rollouts import Array, Rollouts

HEAD_TOKENS = 3  # at the beginning of a turn: what a tool boundary tears
LEAST, TIMES, MOST = 5, 10, 0.3  # of one step among others: see `of_step`

State = Literal["ok", "warning", "unsound"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Args:
        check: its name.
        state: unsound data can be no evidence; a warning is for the reader to weigh.
        text: one sentence, with its numbers.
        numbers: the same, for programs.
        first: the place of the first sequence it is about; "" where there is none.
        odd: where too large a share makes it unsound: the tokens or sequences that are odd, all of
            them, and the share that may be; None where any one does.
    """

    check: str
    state: State
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    first: str = ""
    odd: tuple[int, int, float] | None = None

    @property
    def placed(self) -> str:
        """The text, with the place where it is about something odd."""
        place = f" (first: {self.first})" if self.first and self.state != "ok" else ""
        return self.text + place


def errors_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Why data can be no evidence; empty where it can."""
    return tuple(finding.placed for finding in findings if finding.state == "unsound")


def of_step(finding: Finding, run: tuple[int, int] = (0, 0)) -> Finding:
    """What a finding about one step among others says.

    A few in a few hundred are no sign that a step is broken, and the whole run is held against
    the share that may be odd.  Ten times that share is, or three in ten, and no fewer than five.

    Args:
        run: odd ones and all of the steps so far, this one included, where no one else holds the
            whole run against that share.
    """
    if finding.state != "unsound" or finding.odd is None:
        return finding
    odd, whole, most = finding.odd
    broken = odd >= LEAST and odd > min(TIMES * most, MOST) * whole
    often = run[0] >= LEAST and run[0] > most * run[1]
    return finding if broken or often else replace(finding, state="warning")


class Check(Protocol):
    """Sees the chunks of a dump in their order, and holds sums only."""

    def add(self, rollouts: Rollouts) -> None: ...

    def finding(self) -> Finding: ...


CHECKS: Registry[Callable[[], Check]] = Registry("check of a dump")
C = TypeVar("C", bound=Callable[[], Check])


def check(name: str) -> Callable[[C], C]:
    return CHECKS.register(name)  # type: ignore[return-value]


class FirstPlace:
    """The place of the first sequence that something was seen in."""

    def __init__(self) -> None:
        self.place = ""

    def add(self, rollouts: Rollouts, flag_N: Array) -> None:
        """Take the sequence of the first flagged token, unless one is known."""
        if flag_N.any():
            self.place = self.place or rollouts.source_S[rollouts.sequence_N[flag_N.argmax()]]


def share(part: int, whole: int) -> float:
    """A share of tokens; NaN of none."""
    return part / whole if whole else float("nan")


def heads(rollouts: Rollouts) -> Array:
    """Which tokens are among the first of a second or later turn, [N]."""
    return (rollouts.turn_N >= 2) & (rollouts.turn_token_N < HEAD_TOKENS)
