# The recorded top-k tokens of positions, and their sets by earlier text.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from servanda.judgement.clauses.base import Array
from servanda.judgement.clauses.guards import capture_of
from servanda.theory.divergence.precision import errors
from servanda.theory.stats.cells import Cells
from servanda.theory.stats.refutation import SLACK
from servanda.theory.stats.sets import log_bets
from servanda.traces.token_history import SETS, sets_of
from servanda.traces.trace import Trace

_FULL = 1 + SLACK  # largest accepted sum of masses


@dataclass(frozen=True)
class Likeliest:
    """The positions of a trace with recorded top-k tokens.

    Args:
        ids_NK, mass_NK: best first; token_N: the sampled token; before_N: the token before it, or
            -1.
        inside: set -> which of the top-k tokens are in it, [N, K].
        error: bound of the rounding error of their logprobs, nats.
        known_N: mask of these tokens among all of the trace.
    """

    ids_NK: Array
    mass_NK: Array
    token_N: Array
    before_N: Array
    inside: Mapping[str, Array]
    error: float
    known_N: Array

    @classmethod
    def of(cls, trace: Trace, position_N: Array, inside_N: Array) -> Likeliest | None:
        """From the tokens inside; None if the trace has no top-k tokens.

        Args:
            position_N: position of each token within its sequence.
        """
        if trace.best is None:
            return None
        ids_NK, logp_NK = trace.best
        with np.errstate(over="ignore"):
            mass_NK = np.exp(logp_NK)
        known_N = inside_N & (mass_NK.sum(axis=1) <= _FULL)  # false for NaN
        before_N = np.where(position_N > 0, np.roll(trace.token_N, 1), -1)
        sets = {name: sets_of(trace, name) for name in SETS}
        # a logprob of -1e30 has an error of 1e23 nats, and no mass that it could be of
        seen_n = logp_NK[known_N][mass_NK[known_N] > 0]
        error_n = errors(seen_n, capture_of(trace))
        return cls(
            ids_NK[known_N],
            mass_NK[known_N],
            trace.token_N[known_N],
            before_N[known_N],
            {name: in_NK[known_N] for name, in_NK in sets.items() if in_NK is not None},
            max(float(error_n.max(initial=0.0)), SLACK),
            known_N,
        )

    @property
    def n(self) -> int:
        return len(self.token_N)

    def bets(self) -> Array:
        """Log factors of each set at each odds, [sets * odds, N]; empty without known sets."""
        bets = []
        for in_NK in self.inside.values():
            mass_N = np.where(in_NK, self.mass_NK, 0.0).sum(axis=1)
            low_N, high_N = mass_N * np.exp(-self.error), mass_N * np.exp(self.error)
            bets.append(log_bets(low_N, high_N, self._hit(in_NK)))
        return np.concatenate(bets) if bets else np.zeros((0, self.n))

    def drawn_and_expected(self) -> tuple[tuple[float, float], ...]:
        """The observed and expected count of each set."""
        return tuple(
            (float(self._hit(in_NK).sum()), float(self.mass_NK[in_NK].sum()))
            for in_NK in self.inside.values()
        )

    def cells(self, missing: int, log_weight: float = 0.0) -> Cells:
        """See `Cells.of`."""
        return Cells.of(
            *(self.ids_NK, self.mass_NK, self.token_N, self.before_N),
            missing=missing,
            error=self.error,
            log_weight=log_weight,
        )

    def _hit(self, in_NK: Array) -> Array:
        drawn_NK = (self.ids_NK == self.token_N[:, None]) & (self.mass_NK > 0)
        return (drawn_NK & in_NK).any(axis=1)
