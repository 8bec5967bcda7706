# What a mutation found: which mistakes and faults are noticed, and whether a good kernel passes.

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from servanda.authoring.mutation.mutants import Kind
from servanda.errors import Where
from servanda.traces.serialization import to_plain

Mark = Literal["killed", "survived", "equivalent", "refused", "open"]
# of a fault: "open" is one that the time was over for
Fate = Literal["caught", "missed", "undecided", "not applicable", "open"]
Part = Literal["limits", "faults"]
_COUNTED = ("killed", "survived", "caught", "missed", "undecided")
_INTERRUPTED = 130


@dataclass(frozen=True)
class Nearest:
    """The cell that came nearest to noticing something that it did not.

    Args:
        cell: "clause on slice".
        part: how much of its limit, or of the evidence it takes, was reached.
        shown: the numbers, for people.
    """

    cell: str
    part: float
    shown: str

    def __str__(self) -> str:
        return f"{self.cell}, {self.shown}"


@dataclass(frozen=True)
class MutantResult:
    """The result of one mutant.

    Args:
        by: the cases that it fails, where it is killed.
        why: what no test asks, where it survives; the proof, where it is equivalent; what the
            plan says, where it is refused before any test.
        near: of the cases that have something there, the nearest.
    """

    name: str
    kind: Kind
    sentence: str
    mark: Mark
    by: tuple[str, ...] = ()
    why: str = ""
    near: Nearest | None = None
    where: Where | None = None


@dataclass(frozen=True)
class FaultResult:
    """The result of one fault.

    Args:
        value: that was injected.
        outcome: of the check; "" where there was none.
        by: the enforced cells that made the outcome.
        why: what else is to be said: why it was refused, or cannot be injected.
        near: of a fault that is missed, the cell that came nearest.
    """

    fault: str
    value: Any
    fate: Fate
    outcome: str = ""
    by: tuple[str, ...] = ()
    why: str = ""
    near: Nearest | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class FailingCell:
    """A cell that a good kernel does not keep, and why."""

    cell: str
    outcome: str
    why: str
    where: Where | None = None


@dataclass(frozen=True)
class Conformance:
    """A check that is to hold.

    Args:
        kernels: what reports call the two sides.
        outcome: of the check; "refused" where nothing was measured.
        failing: the enforced cells that do not hold.
        cells: how many are enforced.
        groups: prompt groups that it took.
        open: whether the time was over before it was decided.
    """

    kernels: str
    outcome: str
    failing: tuple[FailingCell, ...] = ()
    cells: int = 0
    groups: int = 0
    seconds: float | None = None
    open: bool = False

    @property
    def holds(self) -> bool:
        return self.outcome == "holds"


@dataclass(frozen=True)
class Mutation:
    """How well a contract and its tests distinguish good kernels from bad ones.

    Args:
        asked: the parts that were asked for.
        tests, cases: how many; digest: of the contract.
        limits: one for each mutant.
        itself: the train kernel against itself; None where it was not run.
        own: the contract as it is.
        faulty: the kernels that faults were injected into; "" where none was.
        stopped: "time", "interrupted", or "" if complete.
    """

    contract: str
    digest: str
    asked: tuple[Part, ...]
    tests: int = 0
    cases: int = 0
    limits: tuple[MutantResult, ...] = ()
    itself: Conformance | None = None
    own: Conformance | None = None
    faulty: str = ""
    faults: tuple[FaultResult, ...] = ()
    stopped: str = ""

    @property
    def conforming(self) -> Conformance | None:
        """The check that says whether a good kernel passes: train against itself.

        Where train is a recording, which answers nothing new, the contract as it is.
        """
        return self.itself or self.own

    @property
    def unsatisfiable(self) -> bool:
        """Whether not even the train kernel keeps the contract with itself."""
        check = self.conforming
        return check is not None and not check.holds and not check.open

    @property
    def toothless(self) -> tuple[Part, ...]:
        """The complete parts in which nothing was noticed."""
        return tuple(part for part, noticed in self._bites.items() if noticed and not any(noticed))

    @property
    def wholly_toothless(self) -> bool:
        """Whether that is so of every part that says something."""
        return bool(self.toothless) and all(
            part in self.toothless for part, noticed in self._bites.items() if noticed
        )

    @property
    def _bites(self) -> dict[Part, list[bool]]:
        """Of every moved limit and every fault whether it was noticed; none while some are open."""
        moved = [t for t in self.limits if t.kind == "limit"]
        return {
            "limits": []
            if any(t.mark == "open" for t in moved)
            else [t.mark == "killed" for t in moved if t.mark in _COUNTED],
            "faults": []
            if any(f.fate == "open" for f in self.faults)
            else [f.fate == "caught" for f in self.faults if f.fate in _COUNTED],
        }

    def counts(self, part: Part | None = None) -> tuple[int, int]:
        """(noticed, all that counts) of a part, or of both."""
        marks = [t.mark == "killed" for t in self.limits if t.mark in _COUNTED]
        fates = [f.fate == "caught" for f in self.faults if f.fate in _COUNTED]
        chosen = {"limits": marks, "faults": fates, None: [*marks, *fates]}[part]
        return sum(chosen), len(chosen)

    @property
    def score(self) -> float | None:
        """The share that is noticed; None without mutants and faults."""
        noticed, counted = self.counts()
        return noticed / counted if counted else None

    @property
    def open(self) -> int:
        """How many mutants and faults were not come to."""
        return sum(t.mark == "open" for t in self.limits) + sum(
            f.fate == "open" for f in self.faults
        )

    def exit_code(self, at_least: float | None = None) -> int:
        """0 valid, not toothless and the score is enough; 1 not so; 3 not known in the time.

        130 where it was interrupted.
        """
        if self.stopped == "interrupted":
            return _INTERRUPTED
        if self.unsatisfiable or self.wholly_toothless:
            return 1
        noticed, counted = self.counts()
        everything, wanted = counted + self.open, at_least or 0.0
        # what is open may all be noticed, or nothing of it
        if everything and (noticed + self.open) / everything < wanted:
            return 1
        conforming = self.conforming
        undecided = conforming is not None and not conforming.holds
        if undecided or not noticed or noticed / everything < wanted:
            return 3
        return 0

    def to_dict(self, at_least: float | None = None) -> dict[str, Any]:
        """Plain data for JSON; a number that does not exist is null."""
        noticed, counted = self.counts()
        return to_plain(
            {
                **_plain(self),
                "score": self.score,
                "noticed": noticed,
                "counted": counted,
                "at_least": at_least,
                "unsatisfiable": self.unsatisfiable,
                "toothless": list(self.toothless),
                "exit_code": self.exit_code(at_least),
            }
        )


def _plain(value: Any) -> Any:
    """A value with its places as text."""
    if isinstance(value, Where):
        return str(value)
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return [*map(_plain, value)] if isinstance(value, tuple) else value
