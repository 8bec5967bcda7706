# Numerical clauses: exact values over all positions of the golden corpus, without alpha.  With a
# reference pack, whose top-k tokens give a lower and an upper bound, between these.

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import WHOLE, Clause, Relative
from servanda.contract.model import Contract
from servanda.contract.workload import Path
from servanda.judgement.clauses.base import (
    FLOOR,
    WITHIN_NOISE,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Source,
    View,
    blank,
)
from servanda.judgement.slices.rules import Cut
from servanda.theory.divergence.base import DIVERGENCES, Floats
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


class Golden(Kind, ABC):
    """Kinds on the golden texts: facts about these positions, without alpha."""

    source: ClassVar[Source] = "golden"
    offline_only: ClassVar[str] = "golden texts are measured offline"

    words: ClassVar[Mapping[str, str]] = {
        "holds": "the value is within the limit: a fact about these texts, without chance",
        "violated": "it is beyond the limit and " + FLOOR,
    }

    def noise(self, cell: Cell, view: View) -> tuple[Any, Any]:
        """The noise of a side: on the slice, and on the whole."""
        return self.weigh(cell, view), self.weigh(replace(cell, cut=Cut(WHOLE)), view)

    @abstractmethod
    def value(self, cell: Cell, noise: Any) -> float | None:
        """The value of one side's noise; None without a position."""

    def floor(self, cell: Cell, parts: list[Any]) -> float | None:
        """The floor of the slice, or of the whole if the re-scored sample never met the slice."""
        floors = []
        for inside, whole in (side for part in parts for side in part):
            value = self.value(cell, inside)
            floors.append(self.value(cell, whole) if value is None else value)
        return max((floor for floor in floors if floor is not None), default=None)


@dataclass(frozen=True)
class Fact(Golden):
    """Exact for the recorded positions only."""

    exact: ClassVar[bool] = True

    def weigh(self, cell: Cell, view: View) -> Values:
        return Values.of(view.exact[cell.clause.metric][view.mask(cell.cut)])

    def value(self, cell: Cell, noise: Values) -> float | None:
        return aggregate(cell.clause, noise.known) if noise.known else None

    def judge(
        self, cell: Cell, rounds: list[Values], floor: float | None, look: Interim
    ) -> CellVerdict:
        values = sum(rounds, Values())
        value = self.value(cell, values)
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
        return verdict.but(note=WITHIN_NOISE, reason="within noise")
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
class BoundedFact(Fact):
    """Violated by its lower bound, holds by its upper bound; inconclusive in between.

    The noise floor is only the candidate's: a pack is not scored again.
    """

    exact: ClassVar[bool] = False

    def weigh(self, cell: Cell, view: View) -> Ends:  # type: ignore[override]
        inside_N, name = view.mask(cell.cut), cell.clause.metric
        columns = (f"{name}.low", f"{name}.high", "tail")
        return Ends(*(Values.of(view.exact[column][inside_N]) for column in columns))

    def noise(self, cell: Cell, view: View) -> tuple[Values, Values]:
        return Fact().noise(cell, view)

    def judge(  # type: ignore[override]
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
class Calibration(Golden):
    """An exact value over many golden positions, so it takes no aggregate."""

    def weigh(self, cell: Cell, view: View) -> Scores:
        rows_NC = np.stack([view.exact[name][view.mask(cell.cut)] for name in COLUMNS], axis=-1)
        known_NC = rows_NC[~np.isnan(rows_NC).any(axis=-1)]
        return Scores(tuple(map(tuple, known_NC.tolist())), len(rows_NC) - len(known_NC))

    def value(self, cell: Cell, noise: Scores) -> float | None:
        return noise.value

    def judge(
        self, cell: Cell, rounds: list[Scores], floor: float | None, look: Interim
    ) -> CellVerdict:
        scores = sum(rounds, Scores())
        return judged(cell, scores.value, floor, n=len(scores.rows), missing=scores.missing)


# Corners of the envelope: a numerical clause at the smallest and largest batches and prompts.

MOST_TOKENS = 24  # judged tokens after each prompt of a corner
Exact = Mapping[str, Floats]  # metric -> value at each position, [N]


@dataclass(frozen=True)
class Corner:
    """One corner: the batch size and the prompt length.

    Args:
        prompt_tokens: None if not declared: golden texts unchanged.
        width: number of judged tokens after each prompt.
    """

    batch_size: int
    prompt_tokens: int | None
    width: int
    path: Path

    @property
    def name(self) -> str:
        prompt = f" prompt={self.prompt_tokens}" if self.prompt_tokens else ""
        return f"corner batch={self.batch_size}{prompt}"


@dataclass(frozen=True)
class CornerRun:
    """The exact metrics of one corner, and the noise of each side there."""

    exact: Exact
    selves: tuple[Exact, ...]


@dataclass(frozen=True)
class CornerFact(Fact):
    """Exact for the scored positions of one corner."""

    corner: Corner = field()  # type: ignore[assignment] - narrower, and without a default
    source: ClassVar[Source] = "corners"

    def weigh(  # type: ignore[override]
        self, cell: Cell, runs: Mapping[str, CornerRun]
    ) -> Values:
        return Values.of(runs[self.corner.name].exact[cell.clause.metric])

    def noise(  # type: ignore[override]
        self, cell: Cell, runs: Mapping[str, CornerRun]
    ) -> tuple[tuple[Values, Values], ...]:
        selves = [Values.of(exact[cell.clause.metric]) for exact in runs[self.corner.name].selves]
        return tuple((values, values) for values in selves)


def corners_of(contract: Contract) -> tuple[Corner, ...]:
    """The combinations of low and high batch size and prompt length."""
    envelope = contract.runtime.envelope
    if envelope is None or not (envelope.batch_size or envelope.prompt_tokens):
        return ()
    infer = contract.kernels.infer
    batches = envelope.batch_size or (infer.batch_size,)
    prompts = [max(1, int(n)) for n in envelope.prompt_tokens or ()] or [None]
    new = contract.workload.sampling.max_new_tokens if contract.workload else MOST_TOKENS
    path: Path = envelope.path or infer.path or "decode"
    return tuple(
        Corner(max(1, int(batch)), prompt, min(new, MOST_TOKENS), path)
        for batch, prompt in dict.fromkeys(itertools.product(batches, prompts))
    )
