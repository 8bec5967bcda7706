# Numerical clauses against a reference pack: facts between two ends, and no alpha.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from servanda.judgement.clauses.base import Cell, CellVerdict, Look, Source, View
from servanda.judgement.clauses.numerical import Fact, Values, aggregate, judged
from servanda.theory.divergence.base import DIVERGENCES


@dataclass(frozen=True)
class Ends:
    """Both ends of a metric at golden positions, and the mass that the pack left out there."""

    low: Values
    high: Values
    tail: Values

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.low + other.low, self.high + other.high, self.tail + other.tail)


@dataclass(frozen=True)
class BoundedFact:
    """Violated by its lower end, holds by its upper one; between the two it is open.

    The floor is the self-noise of the candidate alone: a pack is not scored again.
    """

    counts: ClassVar[bool] = False  # nothing is inferred, so no alpha is spent
    source: ClassVar[Source] = "golden"
    peers: ClassVar[tuple[str, ...]] = ()

    def weigh(self, cell: Cell, view: View) -> Ends:
        inside_N, name = view.mask(cell.cut), cell.clause.metric
        columns = (f"{name}.low", f"{name}.high", "tail")
        return Ends(*(Values.of(view.exact[column][inside_N]) for column in columns))

    def noise(self, cell: Cell, view: View) -> tuple[Values, Values]:
        """Of the candidate against itself: on the slice, and on the whole."""
        return Fact().noise(cell, view)

    def floor(self, cell: Cell, parts: list[tuple[tuple[Values, Values], ...]]) -> float | None:
        """Of the slice, or of the whole where the tenth never met the slice."""
        return Fact().floor(cell, parts)

    def judge(self, cell: Cell, rounds: list[Ends], floor: float | None, look: Look) -> CellVerdict:
        ends = sum(rounds, Ends(Values(), Values(), Values()))
        n, missing = len(ends.low.known), ends.low.missing
        unit = DIVERGENCES[cell.clause.metric].unit
        low = aggregate(cell.clause, ends.low.known) if n else None
        verdict = judged(cell, low, floor, n=n, missing=missing, unit=unit)
        if low is None:
            return verdict
        high = aggregate(cell.clause, ends.high.known)
        verdict = verdict.but(kind="bound", value=None, interval=(low, high))
        if verdict.outcome != "holds" or (verdict.limit is not None and high <= verdict.limit):
            return verdict
        tail = sum(ends.tail.known) / n
        return verdict.but(
            outcome="inconclusive",
            note=f"the pack's best tokens leave it open (they leave out {tail:.2g} of the mass on "
            "average): the reference's full logits would decide",
        )
