# Tilts: the response of a validity check to hypothetical faults.
#
# At each position the top-k tokens have masses m, and all others together the rest.  A fault of
# known strength would sample them with masses a instead.  The check's component j adds log f_j to
# its log e-value, whose mean and square under a follow from the masses alone.  They add up over
# positions, and the sum is nearly normal: component j then reaches a threshold x with probability
# 0.9 or more if mean_j - 1.28 sd_j >= x.
#
# Without resampling: the result depends only on the run's own tokens.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import Floats

Z = 1.2815515655446004  # the normal quantile at 0.9
_LEAST = 1e-300

# strengths, weakest first: each fault of a kind is stronger than those before it
STRENGTHS: Mapping[str, tuple[float, ...]] = {
    "colder": (0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5),
    "hotter": (1.005, 1.01, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5),
    "top_p": (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5),
    "presence": (0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2),
    "repetition": (1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.1, 1.15, 1.2, 1.3, 1.5, 2),
}


@dataclass(frozen=True)
class Tilts:
    """Means and squares of log factors under each strength of one fault.

    Args:
        n: number of positions.
        mean, square: sums over positions, [strengths, components].
    """

    n: float
    mean: Floats = field(repr=False, compare=False)
    square: Floats = field(repr=False, compare=False)

    def beside(self, other: Tilts) -> Tilts:
        """The same positions with the components of both."""
        mean = np.concatenate([self.mean, other.mean], axis=1)
        return Tilts(self.n, mean, np.concatenate([self.square, other.square], axis=1))

    def scaled(self, times: float) -> Tilts:
        """Scaled to a multiple of the positions."""
        return Tilts(self.n * times, self.mean * times, self.square * times)

    def reached(self, price: float, drift: float = 0.0, spread: float = 0.0) -> int | None:
        """The first strength from which all reach a threshold with probability 0.9.

        Args:
            price: threshold of one component, nats.
            drift, spread: mean and variance of the sum that is added to every component.
        """
        if not self.n:
            return None
        variance = np.maximum(self.square - self.mean**2 / self.n, 0.0) + spread
        ends_F = (self.mean + drift - Z * np.sqrt(variance)).max(axis=1)
        short = np.flatnonzero(ends_F < price)
        first = int(short[-1]) + 1 if len(short) else 0
        return first if first < len(ends_F) else None


def tilted(fault: str, strength: float, mass_NK: Floats, in_NK: NDArray[np.bool_]) -> Floats:
    """Masses of the top-k tokens and of the rest under a fault, [N, K + 1], rows of sum 1.

    Args:
        mass_NK: reported, best first.
        in_NK: tokens to which a penalty applies.

    A temperature t gives masses m^(1/t); unrecorded tokens are taken to be as likely as the
    smallest recorded one, which understates the fault.  A presence penalty of x nats is m exp(-x),
    and a repetition penalty m^x on the logprobs.
    """
    rest_N = np.maximum(1 - mass_NK.sum(axis=1), 0.0)
    if fault == "top_p":
        before_NK = mass_NK.cumsum(axis=1) - mass_NK
        kept_NK = np.where(before_NK < strength, mass_NK, 0.0)
        found = np.column_stack([kept_NK, np.clip(strength - mass_NK.sum(axis=1), 0.0, rest_N)])
    elif fault == "presence":
        found = np.column_stack([np.where(in_NK, mass_NK * np.exp(-strength), mass_NK), rest_N])
    elif fault == "repetition":
        found = np.column_stack([np.where(in_NK, mass_NK**strength, mass_NK), rest_N])
    else:
        power = 1 / strength
        least_N = np.where(mass_NK > 0, mass_NK, np.inf).min(axis=1, initial=1.0)
        found = np.column_stack([mass_NK**power, rest_N * least_N ** (power - 1)])
    return found / np.maximum(found.sum(axis=1, keepdims=True), _LEAST)


def by_cells(fault: str, mass_NK: Floats, in_NK: NDArray[np.bool_], factors_JNC: Floats) -> Tilts:
    """From components with a known log factor per cell: the top-k tokens and the rest."""
    parts = []
    for strength in STRENGTHS[fault]:
        share_NC = tilted(fault, strength, mass_NK, in_NK)
        mean_JN = np.einsum("nc,jnc->jn", share_NC, factors_JNC)
        square_JN = np.einsum("nc,jnc->jn", share_NC, factors_JNC**2)
        parts.append((mean_JN.sum(axis=1), square_JN.sum(axis=1)))
    mean_FJ, square_FJ = (np.array(part) for part in zip(*parts, strict=True))
    return Tilts(float(len(mass_NK)), mean_FJ, square_FJ)


def by_rank(
    fault: str, mass_NK: Floats, log_f: Callable[[Floats], Floats], edge_B: Floats
) -> Tilts:
    """From components that are functions of the PIT of the sampled token.

    The top-k tokens occupy consecutive intervals of [0, 1), followed by the rest; a fault changes
    the density over each, and the bins average it.

    Args:
        log_f: function of PIT values [n] to log factors [J, n].
        edge_B: edges of bins in which log_f is smooth, from 0 to 1.
    """
    nothing = np.zeros(mass_NK.shape, dtype=bool)
    rest_N1 = np.maximum(1 - mass_NK.sum(axis=1, keepdims=True), 0.0)
    width_NC = np.column_stack([mass_NK, rest_N1])
    start_NC = width_NC.cumsum(axis=1) - width_NC
    inside_NCB = np.clip(
        (edge_B - start_NC[..., None]) / np.maximum(width_NC, _LEAST)[..., None], 0.0, 1.0
    )
    # means of log f and of its square over each bin, from evenly spaced points
    point_BP = edge_B[:-1, None] + np.diff(edge_B)[:, None] * (np.arange(16) + 0.5) / 16
    log_JBP = log_f(point_BP.ravel()).reshape(-1, *point_BP.shape)
    mean_JB, square_JB = log_JBP.mean(axis=2), (log_JBP**2).mean(axis=2)
    share_FB = np.array(
        [
            np.diff(np.einsum("nc,ncb->b", tilted(fault, s, mass_NK, nothing), inside_NCB))
            for s in STRENGTHS[fault]
        ]
    )
    return Tilts(float(len(mass_NK)), share_FB @ mean_JB.T, share_FB @ square_JB.T)
