# The calibration clause: do both kernels mean the same by their confidence?

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servanda.judgement.clauses.base import Cell, CellVerdict, Kind, Look, View
from servanda.judgement.clauses.numerical import judged
from servanda.theory.divergence.calibration import calibration

COLUMNS = ("conf_train", "hit_train", "conf_infer", "hit_infer")


@dataclass(frozen=True)
class Scores:
    """Confidence and hit of both kernels at golden positions, and positions without them."""

    rows: tuple[tuple[float, ...], ...] = ()
    missing: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.rows + other.rows, self.missing + other.missing)

    @property
    def value(self) -> float | None:
        return calibration(*np.array(self.rows).T) if self.rows else None


@dataclass(frozen=True)
class Calibration(Kind):
    """A fact about many golden positions at once, so it takes no aggregate."""

    source = "golden"

    def weigh(self, cell: Cell, view: View) -> Scores:
        return _scores(view, view.mask(cell.cut))

    def noise(self, cell: Cell, view: View) -> tuple[Scores, Scores]:
        """Of a side against itself: on the slice, and on the whole."""
        return self.weigh(cell, view), _scores(view, np.ones(len(view.usable_N), dtype=bool))

    def floor(self, cell: Cell, parts: list[tuple[tuple[Scores, Scores], ...]]) -> float | None:
        """Of the slice, or of the whole where the tenth never met the slice."""
        sides = [slice_ if slice_.rows else whole for part in parts for slice_, whole in part]
        return max((s.value for s in sides if s.value is not None), default=None)

    def judge(
        self, cell: Cell, rounds: list[Scores], floor: float | None, look: Look
    ) -> CellVerdict:
        scores = sum(rounds, Scores())
        return judged(cell, scores.value, floor, n=len(scores.rows), missing=scores.missing)


def _scores(view: View, inside_N: np.ndarray) -> Scores:
    rows_NC = np.stack([view.exact[name][inside_N] for name in COLUMNS], axis=-1)
    known_NC = rows_NC[~np.isnan(rows_NC).any(axis=-1)]
    return Scores(tuple(map(tuple, known_NC.tolist())), len(rows_NC) - len(known_NC))
