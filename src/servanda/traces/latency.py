# Latency of served requests: the record of one batch that ran together.
#
# Axes: S requests, T steps, N tokens of all requests but their first.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Seconds = tuple[float, ...]


@dataclass(frozen=True)
class Timing:
    """The timing of one served batch, in seconds of the engine's clock.

    Args:
        first_S: from the dispatch of the batch to each request's first token.
        gap_N: between consecutive tokens, request after request.
        wall: from the dispatch to the last token of all.
    """

    first_S: Seconds
    gap_N: Seconds
    wall: float

    @classmethod
    def of(cls, begun: float, step_T: Sequence[float], length_S: Sequence[int]) -> Timing:
        """From clock readings: of the dispatch, and of each step that gave a token to all.

        >>> Timing.of(1.0, [1.5, 2.0, 2.25], [3, 1])
        Timing(first_S=(0.5, 0.5), gap_N=(0.5, 0.25), wall=1.25)
        """
        gap_T = [after - before for before, after in pairwise(step_T)]
        return cls(
            first_S=tuple(step_T[0] - begun for _ in length_S),
            gap_N=tuple(gap for length in length_S for gap in gap_T[: length - 1]),
            wall=step_T[-1] - begun,
        )

    @classmethod
    def of_requests(cls, begun: float, at_ST: Sequence[Sequence[float]]) -> Timing:
        """From clock readings: of the dispatch, and of each token of each request."""
        return cls(
            first_S=tuple(at_T[0] - begun for at_T in at_ST),
            gap_N=tuple(after - before for at_T in at_ST for before, after in pairwise(at_T)),
            wall=max(at_T[-1] for at_T in at_ST) - begun,
        )

    @classmethod
    def join(cls, parts: Sequence[Timing]) -> Timing:
        """Batches that were dispatched at once and ran one after another."""
        return cls(
            tuple(s for part in parts for s in part.first_S),
            tuple(s for part in parts for s in part.gap_N),
            max(part.wall for part in parts),
        )

    @property
    def tokens(self) -> int:
        return len(self.first_S) + len(self.gap_N)
