# Procedures under simulation: the share of runs with a wrong verdict, and the allowed share.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.theory.scenarios import SCENARIOS
from benchmarks.theory.simulation import ALPHA

RUNS = 2000
_CHUNK = 250  # runs in memory at a time
_MARGIN = 2.326  # one-sided 99 % of the normal approximation to the binomial


@dataclass(frozen=True)
class Row:
    """One procedure in one scenario.

    Args:
        ours: whether Servanda uses it.
        answer: "holds" or "violated", the one that was wrong more often; "" where none was.
        wrong: share of the runs in which it ever was; where a procedure promises a share of
            false discoveries, their mean share.
    """

    scenario: str
    procedure: str
    ours: bool
    answer: str
    runs: int
    wrong: float

    @property
    def allowed(self) -> float:
        """alpha, and the margin that so many runs leave to chance."""
        return ALPHA + _MARGIN * math.sqrt(ALPHA * (1 - ALPHA) / self.runs)

    @property
    def ratio(self) -> float:
        """How many times alpha."""
        return self.wrong / ALPHA

    @property
    def beyond(self) -> bool:
        """Whether chance alone does not explain it."""
        return self.wrong > self.allowed


def simulate(scenario: str, runs: int = RUNS, seed: int = 0) -> tuple[Row, ...]:
    """Every procedure of a scenario, over seeded runs; the same seed gives the same numbers."""
    wrong: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for first in range(0, runs, _CHUNK):
        rng = np.random.default_rng([seed, first, *scenario.encode()])
        for name, ours, found in SCENARIOS[scenario].run(rng, min(_CHUNK, runs - first)):
            sums = (float(found.holds_R.sum()), float(found.violated_R.sum()))
            wrong.setdefault((name, ours), []).append(sums)
    rows = []
    for (name, ours), sums in wrong.items():
        holds, violated = (math.fsum(side) / runs for side in zip(*sums, strict=True))
        answer = "" if not holds + violated else "holds" if holds >= violated else "violated"
        rows.append(Row(scenario, name, ours, answer, runs, max(holds, violated)))
    return tuple(rows)
