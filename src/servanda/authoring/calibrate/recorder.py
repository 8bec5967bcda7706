# Recorder: the data of a run's closed rounds for clauses, stored instead of evaluated; and the
# check that a run is valid for calibration.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from servanda.contract.identity import EvidenceKey
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import Cell, Kind, Source, View
from servanda.judgement.evidence import Round, weigh
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict


@dataclass(frozen=True)
class _PassThrough:
    """A kind whose statistics of a round are its input."""

    kind: Kind
    counts: ClassVar[bool] = False
    peers: ClassVar[tuple[str, ...]] = ()

    @property
    def source(self) -> Source:
        return self.kind.source

    def weigh(self, cell: Cell, view: View) -> View:
        return view

    def noise(self, cell: Cell, view: View) -> View:
        return view


@dataclass(frozen=True)
class Rounds:
    """The closed rounds of one workload.

    Args:
        own: per round, of both kernels; selves: per round, (train, infer) compared with themselves.
    """

    own: tuple[View, ...]
    selves: tuple[tuple[View, ...], ...]

    @property
    def groups(self) -> int:
        """Prompt groups that were dispatched."""
        return sum(view.launched for view in self.own)


def closed_rounds(plan: Plan, key: EvidenceKey, rounds: Iterable[Round]) -> Mapping[str, Rounds]:
    """The closed rounds of every workload with a clause; pure."""
    cells = tuple(replace(cell, kind=_PassThrough(cell.kind)) for cell in plan.cells)  # type: ignore[arg-type]
    evidence = weigh(replace(plan, cells=cells), key, rounds)
    by_workload: dict[str, Rounds] = {}
    for schedule in plan.schedules:
        at = [i for i, cell in enumerate(plan.cells) if cell.workload == schedule.name]
        closed = evidence.closed(schedule.name)
        if at and closed:
            own: tuple[Any, ...] = tuple(part.statistics[at[0]] for part in closed)
            by_workload[schedule.name] = Rounds(own, tuple(part.noise[at[0]] for part in closed))
    return by_workload


def accept(plan: Plan, verdict: Verdict) -> None:
    """Refuse a run that is invalid for calibration.

    A run that exceeds its limits is accepted: calibration assumes that the pair is good.

    Raises:
        EvidenceError: an injected fault, a failed validity check, or a measurement error.
    """
    kernels = plan.contract.kernels
    for side, kernel in (("train", kernels.train), ("infer", kernels.infer)):
        if kernel.fault:
            raise EvidenceError(
                f"the {side} kernel of this run has a fault on purpose "
                f"({', '.join(kernel.fault)}): that is no pair to keep",
                hint=f"take kernels.{side}.fault out, and measure",
            )
    for cell in verdict.cells:
        wrong = cell.outcome == "error" and cell.enforced
        guard = cell.section == "observability" and cell.enforced and cell.outcome == "violated"
        if wrong or guard:
            word = "violated" if guard else "in error"
            raise EvidenceError(
                f"{cell.clause!r} on slice {cell.slice!r} is {word}, so the numbers of this run "
                f"are not what they claim ({cell.note})",
                hint="repair what it says, and measure with --fresh",
            )
