# Transform: whether a sampler setting that only one side applies explains the difference.
#
# Two settings have a signature that kernel noise lacks.  A cut (top-p, top-k, min-p) that the
# engine renormalises removes mass from the trainer's distribution, so the mean weight is below 1 by
# that mass and hardly any weight exceeds 1.  A temperature changes log p to log p / T minus a
# constant of the context, so the log ratio is linear in the engine's log p; that of the trainer
# correlates with the log ratio for any noise.

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ENOUGH = 1000  # fewest tokens for a finding
_FAR_NATS = math.log(2)
_FAR_SHARE = 0.002  # share of tokens with a weight above 2: none for a cut, more for heavy tails
_SIGMAS = 5.0
_STEEPEST = 0.5  # |T - 1|: independent noise has a larger slope
_EDGES_NATS = np.geomspace(1e-4, 20.0, 40)  # of bins of -log p


class Transform:
    """Sums over the tokens with both logprobs, of constant size."""

    def __init__(self) -> None:
        self.n = self.far = 0
        self.above = self.below = self.squares = 0.0  # of (w - 1)^+, (1 - w)^+ and (w - 1)^2
        # of each bin of log p_infer: tokens, and sums of x, d, xd, dd; x = log p, d = log ratio
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
        x_K, d_K = logp_infer_N[known_N], d_N[known_N]
        bin_K = np.searchsorted(_EDGES_NATS, -x_K)
        for row, values_K in enumerate((None, x_K, d_K, x_K * d_K, d_K * d_K)):
            self.bins[row] += np.bincount(bin_K, values_K, minlength=self.bins.shape[1])

    def cut(self) -> tuple[float, float]:
        """Mass of train that infer cannot sample, and the share of the difference it explains.

        E w = 1 - mass, and E(1 - w)^+ = mass without noise.  (0, 0) where noise may be the reason.
        """
        if self.n < ENOUGH:
            return 0.0, 0.0
        mass = (self.below - self.above) / self.n
        error = math.sqrt(self.squares / self.n / self.n)
        if self.far > _FAR_SHARE * self.n or mass < _SIGMAS * error:
            return 0.0, 0.0
        return mass, mass * self.n / self.below if self.below else 0.0

    def temperature(self) -> tuple[float, float]:
        """The engine's temperature over the trainer's, and the share of the variance of d it has.

        With x = log p_infer, d is (T - 1)(x + the entropy of the context) to first order, and
        tokens come from infer, so that its variance over its covariance with x is T - 1, however
        the entropies of contexts vary.  The share of the variance of d that lies between bins of
        x is at most what T explains.  (1, 0) if unknown.
        """
        n, x, d, xd, dd = self.bins.sum(axis=1)
        if n < ENOUGH:
            return 1.0, 0.0
        spread, slope = dd / n - (d / n) ** 2, xd / n - x / n * d / n
        if not (spread > 0 and slope) or abs(b := spread / slope) > _STEEPEST:
            return 1.0, 0.0
        return 1 + b, self.between()

    def between(self) -> float:
        """The share of the variance of d that lies between bins of log p."""
        n_B, _, d_B, *_ = self.bins
        n, _, d, _, dd = self.bins.sum(axis=1)
        if n < ENOUGH or not (spread := dd / n - (d / n) ** 2) > 0:
            return 0.0
        met_B = n_B > 0
        return (float((d_B[met_B] ** 2 / n_B[met_B]).sum()) / n - (d / n) ** 2) / spread
