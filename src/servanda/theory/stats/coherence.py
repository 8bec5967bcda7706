# Coherence: tests whether the two logprobs can be those of two distributions, with samples from
# infer's.
#
# E_infer w is the train kernel's mass on tokens that infer can sample, w = p / q: never above 1,
# for any two kernels.  So 1 + t (min(w, C) - 1) has a mean of at most 1 for every t in [0, 1], and
# the products over tokens can only reject.  A mean of w *below* 1 is no evidence: weights are
# skewed, and most samples are below their mean.
#
# It detects raw logprobs on infer with processed ones on train, logprobs of other tokens, and
# probabilities that add up to more than 1.  It does not detect another temperature of train: that
# is another distribution, which `tv` measures.
#
# Recorded weights differ from the kernels' own: rounding both logprobs changes log w by at most the
# sum of their two errors.  Each weight is taken at its lower end, so that a coarse record of
# correct kernels is not rejected.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servanda.theory.stats.bets import Floats
from servanda.theory.stats.refutation import SLACK, Refutation

CAP = 10.0  # cap of w, so that no single token can reject
_BETS: Floats = np.geomspace(0.01, 0.99, 16)


@dataclass(frozen=True)
class Coherence(Refutation):
    """Evidence that E_infer w > 1."""

    @classmethod
    def of(
        cls,
        log_ratio_N: Floats,
        missing: int = 0,
        error_N: Floats | float = 0.0,
        count_N: Floats | None = None,
    ) -> Coherence:
        """From one closed round of log-ratios log p - log q, nats, in dispatch order.

        Args:
            log_ratio_N: -inf without mass under train; neither NaN nor +inf.
            missing: dispatched tokens without a value: each is charged w = 0.
            error_N: rounding error bound of each log-ratio, nats; see `precision.errors`.
            count_N: number of tokens with each log-ratio; default one.

        Source:
            I. Waudby-Smith, A. Ramdas, Estimating means of bounded random variables by betting,
            2024; the cap and the bets are ours.
        """
        growth_JN = growths(log_ratio_N - np.maximum(error_N, SLACK))
        count_N = np.ones(growth_JN.shape[1]) if count_N is None else count_N
        sums = growth_JN @ count_N
        sums += missing * np.log1p(-_BETS)
        return cls(int(count_N.sum()), tuple(sums.tolist()), missing)


def growths(least_N: Floats) -> Floats:
    """The growth of each bet by one token, [bets, N], from the lower end of its log-ratio."""
    weight_N = np.minimum(np.exp(np.minimum(least_N, np.log(CAP))), CAP)
    return np.log1p(_BETS[:, None] * (weight_N - 1))
