# Transform: whether a sampler setting that only one side applies explains the difference.
#
# Two settings have a signature that kernel noise lacks.  A cut (top-p, top-k, min-p) that the
# engine renormalises removes mass from the trainer's distribution, so the mean weight is below 1 by
# that mass and hardly any weight exceeds 1.  A temperature changes log p to log p / T minus a
# constant of the context, so the log ratio is linear in log p.  Each is reported only if it
# explains at least half of the difference.

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ENOUGH = 1000  # fewest tokens for a finding
_MOST_OF_IT = 0.5
_FAR_NATS = math.log(2)
_FAR_SHARE = 0.002  # share of tokens with a weight above 2: none for a cut, more for heavy tails
_SIGMAS = 5.0
_STEEPEST = 0.5  # |1 - 1/T|: large independent noise has a larger slope, about 1
_EDGES_NATS = np.geomspace(1e-4, 20.0, 40)  # of bins of -log p


class Transform:
    """Sums over the tokens with both logprobs, of constant size."""

    def __init__(self) -> None:
        self.n = self.far = 0
        self.above = self.below = self.squares = 0.0  # of (w - 1)^+, (1 - w)^+ and (w - 1)^2
        # of each bin of log p_train: tokens, and sums of x, d, xd, dd; x = log p, d = log ratio
        self.bins = np.zeros((5, len(_EDGES_NATS) + 1))

    def add(self, logp_train_N: Array, logp_infer_N: Array) -> None:
        """Both logprobs of some tokens, nats; a train logprob may be -inf."""
        d_N = logp_train_N - logp_infer_N
        gap_N = np.expm1(np.minimum(d_N, 300.0))
        self.n += len(d_N)
        self.far += int((d_N > _FAR_NATS).sum())
        self.above += float(np.maximum(gap_N, 0.0).sum())
        self.below -= float(np.minimum(gap_N, 0.0).sum())
        self.squares += float((gap_N * gap_N).sum())
        known_N = np.isfinite(d_N)
        x_K, d_K = logp_train_N[known_N], d_N[known_N]
        bin_K = np.searchsorted(_EDGES_NATS, -x_K)
        for row, values_K in enumerate((None, x_K, d_K, x_K * d_K, d_K * d_K)):
            self.bins[row] += np.bincount(bin_K, values_K, minlength=self.bins.shape[1])

    def join(self, later: Transform) -> None:
        """Add the tokens of later steps."""
        self.n += later.n
        self.far += later.far
        self.above += later.above
        self.below += later.below
        self.squares += later.squares
        self.bins += later.bins

    def cause(self) -> str:
        """The setting that explains most of the difference, in one line; "" if none does."""
        if self.n < ENOUGH:
            return ""
        return self._cut() or self._temperature()

    def _cut(self) -> str:
        """Mass that infer cannot sample: E w = 1 - mass, and E(1 - w)^+ = mass without noise."""
        mass = (self.below - self.above) / self.n
        error = math.sqrt(self.squares / self.n / self.n)
        share = mass * self.n / self.below if self.below else 0.0
        if self.far > _FAR_SHARE * self.n or mass < _SIGMAS * error or share < _MOST_OF_IT:
            return ""
        return (
            f"the engine cannot sample {100 * mass:.2g} % of the trainer's mass and renormalises "
            f"the rest: a top-p of at most {_rest(mass)}, a top-k or a min-p that the trainer "
            f"does not apply; it explains {100 * share:.0f} % of the difference"
        )

    def _temperature(self) -> str:
        """d = (1 - 1/T) x - c of the context, and c is about (1/T - 1) times its entropy.

        With b = 1 - 1/T, d is b (x + cross entropy): its mean is near 0 in each context, so its
        variance over its covariance with x is b, however the entropies of contexts vary.  The
        share of the variance of d that lies between bins of x is at most what b explains.
        """
        n_B, _, d_B, *_ = self.bins
        n, x, d, xd, dd = self.bins.sum(axis=1)
        if n < ENOUGH:
            return ""
        spread, slope = dd / n - (d / n) ** 2, xd / n - x / n * d / n
        if not (spread > 0 and slope):
            return ""
        b = spread / slope
        met_B = n_B > 0
        between = float((d_B[met_B] ** 2 / n_B[met_B]).sum()) / n - (d / n) ** 2
        share = between / spread
        if abs(b) > _STEEPEST or share < _MOST_OF_IT:
            return ""
        return (
            f"a temperature: the engine sampled at about {1 / (1 - b):.2f} times the "
            f"trainer's; the log ratio follows log p, which explains at least "
            f"{100 * share:.0f} % of its variance"
        )


def _rest(mass: float) -> str:
    """1 - x, with enough digits to differ from 1.

    >>> _rest(0.1), _rest(0.003), _rest(3e-6)
    ('0.9', '0.997', '0.999997')
    """
    digits = max(1, 1 - math.floor(math.log10(mass)))
    return f"{1 - mass:.{digits}f}".rstrip("0")
