# Numerical clauses: exact values over all positions of the golden corpus, without alpha.  With a
# reference pack, whose top-k tokens give a lower and an upper bound, between these.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import Clause, Relative
from servanda.judgement.clauses.base import (
    WITHIN_NOISE,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Source,
    View,
    blank,
)
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.calibration import calibration


@dataclass(frozen=True)
class Values:
    """Exact values of a metric at golden positions, and the number of positions without one."""

    known: tuple[float, ...] = ()
    missing: int = 0

    @classmethod
    def of(cls, values_N: NDArray[np.floating]) -> Values:
        """From a column in which NaN means no value."""
        known_N = values_N[~np.isnan(values_N)]
        return cls(tuple(known_N.tolist()), len(values_N) - len(known_N))

    def __add__(self, other: Values) -> Values:
        return Values(self.known + other.known, self.missing + other.missing)


def aggregate(clause: Clause, values: tuple[float, ...]) -> float:
    """max (the default), mean, or the N-th percentile of the positions."""
    if clause.percentile is not None:
        return float(np.quantile(values, clause.percentile / 100, method="inverted_cdf"))
    return float(np.mean(values) if clause.aggregate == "mean" else np.max(values))


@dataclass(frozen=True)
class Fact(Kind):
    """Exact for the recorded positions only."""

    source: ClassVar[Source] = "golden"

    def weigh(self, cell: Cell, view: View) -> Values:
        return Values.of(view.exact[cell.clause.metric][view.mask(cell.cut)])

    def noise(self, cell: Cell, view: View) -> tuple[Values, Values]:
        """The noise of a side: on the slice, and on the whole."""
        return self.weigh(cell, view), Values.of(view.exact[cell.clause.metric])

    def floor(self, cell: Cell, parts: list[tuple[tuple[Values, Values], ...]]) -> float | None:
        """The floor of the slice, or of the whole if the re-scored sample never met the slice."""
        sides = [slice_ if slice_.known else whole for part in parts for slice_, whole in part]
        return max((aggregate(cell.clause, s.known) for s in sides if s.known), default=None)

    def judge(
        self, cell: Cell, rounds: list[Values], floor: float | None, look: Interim
    ) -> CellVerdict:
        values = sum(rounds, Values())
        value = aggregate(cell.clause, values.known) if values.known else None
        unit = DIVERGENCES[cell.clause.metric].unit
        return judged(cell, value, floor, n=len(values.known), missing=values.missing, unit=unit)


def judged(
    cell: Cell, value: float | None, floor: float | None, *, n: int, missing: int, unit: str = ""
) -> CellVerdict:
    """Compare a value with its limit: violated only above both the limit and twice the noise floor.

    Args:
        value: None if no position has one.
        n, missing: golden positions with and without a value.
    """
    limit = cell.clause.at_most
    if isinstance(limit, Relative):
        limit = None if floor is None else limit.times * floor
    verdict = blank(
        cell,
        "inconclusive",
        kind="fact",
        unit=unit,
        limit=limit,
        floor=floor,
        n=n,
        units="golden positions",
        missing=missing,
    )
    if limit is None:
        return verdict.but(note="the noise floor was not measured: the corpus is too small")
    if value is None:
        if missing:
            return verdict.but(outcome="error", note="no golden position has finite logits")
        return verdict.but(note=f"slice {cell.cut.name!r} met no golden position")
    verdict = verdict.but(value=value)
    if value > max(limit, 2 * (floor or 0.0)):
        return verdict.but(outcome="violated")
    if missing:
        return verdict.but(
            outcome="error", note=f"{missing} golden positions have NaN or infinite logits"
        )
    if value > limit:
        return verdict.but(note=WITHIN_NOISE)
    return verdict.but(outcome="holds")


@dataclass(frozen=True)
class Ends:
    """Lower and upper bound of a metric at golden positions, and the mass missing in the pack."""

    low: Values
    high: Values
    tail: Values

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.low + other.low, self.high + other.high, self.tail + other.tail)


@dataclass(frozen=True)
class BoundedFact(Kind):
    """Violated by its lower bound, holds by its upper bound; inconclusive in between.

    The noise floor is only the candidate's: a pack is not scored again.
    """

    source: ClassVar[Source] = "golden"

    def weigh(self, cell: Cell, view: View) -> Ends:
        inside_N, name = view.mask(cell.cut), cell.clause.metric
        columns = (f"{name}.low", f"{name}.high", "tail")
        return Ends(*(Values.of(view.exact[column][inside_N]) for column in columns))

    def noise(self, cell: Cell, view: View) -> tuple[Values, Values]:
        return Fact().noise(cell, view)

    def floor(self, cell: Cell, parts: list[tuple[tuple[Values, Values], ...]]) -> float | None:
        return Fact().floor(cell, parts)

    def judge(
        self, cell: Cell, rounds: list[Ends], floor: float | None, look: Interim
    ) -> CellVerdict:
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


COLUMNS = ("conf_train", "hit_train", "conf_infer", "hit_infer")


@dataclass(frozen=True)
class Scores:
    """Confidence and top-1 hit of both kernels at golden positions, and positions without them."""

    rows: tuple[tuple[float, ...], ...] = ()
    missing: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.rows + other.rows, self.missing + other.missing)

    @property
    def value(self) -> float | None:
        return calibration(*np.array(self.rows).T) if self.rows else None


@dataclass(frozen=True)
class Calibration(Kind):
    """An exact value over many golden positions, so it takes no aggregate."""

    source = "golden"

    def weigh(self, cell: Cell, view: View) -> Scores:
        return _scores(view, view.mask(cell.cut))

    def noise(self, cell: Cell, view: View) -> tuple[Scores, Scores]:
        """The noise of a side: on the slice, and on the whole."""
        return self.weigh(cell, view), _scores(view, np.ones(len(view.usable_N), dtype=bool))

    def floor(self, cell: Cell, parts: list[tuple[tuple[Scores, Scores], ...]]) -> float | None:
        """The floor of the slice, or of the whole if the re-scored sample never met the slice."""
        sides = [slice_ if slice_.rows else whole for part in parts for slice_, whole in part]
        return max((s.value for s in sides if s.value is not None), default=None)

    def judge(
        self, cell: Cell, rounds: list[Scores], floor: float | None, look: Interim
    ) -> CellVerdict:
        scores = sum(rounds, Scores())
        return judged(cell, scores.value, floor, n=len(scores.rows), missing=scores.missing)


def _scores(view: View, inside_N: np.ndarray) -> Scores:
    rows_NC = np.stack([view.exact[name][inside_N] for name in COLUMNS], axis=-1)
    known_NC = rows_NC[~np.isnan(rows_NC).any(axis=-1)]
    return Scores(tuple(map(tuple, known_NC.tolist())), len(rows_NC) - len(known_NC))
