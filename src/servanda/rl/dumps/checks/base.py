# The interface of a data quality check: it gets every chunk once, and returns one finding.

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

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
        problem: the name of what is wrong, where the check looks for several things.
    """

    check: str
    state: State
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    first: str = ""
    odd: tuple[int, int, float] | None = None
    problem: str = ""

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

    def join(self, later: Any) -> None:
        """Add the sums of a check of the same kind over later steps, as if one had read both.

        The result has the same bits however the steps were divided; `later` is not used again.
        """
        ...

    def finding(self) -> Finding: ...


CHECKS: Registry[Callable[[], Check]] = Registry("check of a dump")
NEEDS: dict[str, tuple[str, str]] = {}
C = TypeVar("C", bound=Callable[[], Check])


def check(name: str, needs: str = "", asks: str = "") -> Callable[[C], C]:
    """Register a check.

    Args:
        needs: what it reads besides logprobs and the mask; asks: its question, in words, for a
            report on data without that; "" if there is nothing to ask then.
    """
    NEEDS[name] = needs, asks
    return CHECKS.register(name)  # type: ignore[return-value]


class Sums:
    """A check whose attributes are sums: numbers, dictionaries of them, and objects with `join`."""

    def join(self, later: Any) -> None:
        for name, value in vars(self).items():
            setattr(self, name, _sum(value, getattr(later, name)))


def _sum(value: Any, later: Any) -> Any:
    if isinstance(value, Counter):
        return value + later
    if isinstance(value, dict):
        return {key: _sum(value[key], later[key]) for key in value}
    if not isinstance(value, Sums | FirstPlace | StepSums):
        return value + later
    value.join(later)
    return value


class FirstPlace:
    """The place of the first affected sequence."""

    def __init__(self) -> None:
        self.place = ""

    def add(self, rollouts: Rollouts, flag_K: Array) -> None:
        """Record the sequence of the first flagged trained token, unless one is recorded."""
        if not self.place and flag_K.any():
            self.add_token(rollouts, int(flag_K.argmax()))

    def add_token(self, rollouts: Rollouts, trained: int) -> None:
        """Record the sequence of a trained token, [K], unless one is recorded."""
        self.place = (
            self.place or rollouts.source_S[rollouts.sequence_of(rollouts.trained_K[trained])]
        )

    def add_sequence(self, rollouts: Rollouts, flag_S: Array) -> None:
        """Record the first flagged sequence, unless one is recorded."""
        if not self.place and flag_S.any():
            self.place = rollouts.source_S[int(flag_S.argmax())]

    def join(self, later: FirstPlace) -> None:
        self.place = self.place or later.place


class StepSums:
    """Sums of floats, kept for each step: those of several parts are then added in one order."""

    def __init__(self) -> None:
        self._step: int | None = None
        self.steps: list[Array] = []

    def add(self, step: int, sums: Array) -> None:
        if step == self._step:
            self.steps[-1] = self.steps[-1] + sums
        else:
            self._step = step
            self.steps.append(sums)

    def join(self, later: StepSums) -> None:
        self._step = later._step if later.steps else self._step
        self.steps += later.steps

    def total(self, like: Array) -> Array:
        """The sum over all steps; `like` (zeros) without any."""
        return np.add.reduce(self.steps, axis=0) if self.steps else like


def by_squares(total: float, square: float, n: float) -> tuple[float, float]:
    """Whether n values with this sum and sum of squares have a mean of 0.

    Returns:
        The sum in standard errors by its own squares, at most sqrt(n), and Student's t.
    """
    z = total / math.sqrt(square) if square else 0.0
    return z, z / math.sqrt(max(1 - z * z / n, 1e-9)) if n else 0.0


def share(part: int, whole: int) -> float:
    """A share of tokens; NaN without tokens."""
    return part / whole if whole else float("nan")


def digest(column: Array) -> int:
    """A number of the bits of a column, below 2^64."""
    found = hashlib.blake2b(np.ascontiguousarray(column).data, digest_size=8)
    return int.from_bytes(found.digest(), "little")


def heads(rollouts: Rollouts) -> Array:
    """The first tokens of each second and later turn: indices of trained tokens, [turns, 3].

    -1 if a turn has fewer.
    """
    turns = rollouts.turns
    at_TH = turns.trained_T[turns.number_T >= 2, None] + np.arange(HEAD_TOKENS)
    end_T = (turns.trained_T + turns.length_T)[turns.number_T >= 2]
    return np.where(at_TH < end_T[:, None], at_TH, -1)
