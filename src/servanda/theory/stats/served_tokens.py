# Served tokens under the reference: tests whether they follow the candidate's report.
#
# Under the reference, the randomised PIT of a token sampled by the reference is uniform, and a
# density f on [0, 1) has a mean of 1 over it.  The candidate sampled the token, from q and not from
# p; but its reported logprob gives w = p / q, and E_q [w f] = E_p [f] = 1, for any difference of
# the kernels.  So w f is a factor of a valid test of the candidate's sampler that needs the whole
# distribution only from the reference.
#
# It detects an undisclosed temperature, top-p or lost token with logprobs of the declared
# distribution.  It does not detect them with logprobs that disclose them: the log-ratios detect
# those.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from servanda.theory.stats.bets import LEAK, SLACK, Floats, Refutation


@dataclass(frozen=True)
class Served(Refutation):
    """Evidence against the candidate's sampler, by the reference's distribution."""

    @classmethod
    def of(
        cls,
        log_density_JN: Floats,
        log_ratio_N: Floats,
        missing: int = 0,
        error_N: Floats | float = 0.0,
    ) -> Served:
        """From one closed round, in dispatch order.

        Args:
            log_density_JN: log f of each alternative at each token, under the reference; see
                `pit.log_densities` and `likelihood_ratio.log_factors`.
            log_ratio_N: log p - log q of the token, nats; -inf without mass under the reference;
                neither NaN nor +inf.
            missing: dispatched tokens without a value; each is charged LEAK.
            error_N: rounding error bound of each log-ratio, nats.

        Source:
            importance weighting of test martingales; derived in docs/explanation/verdicts.md.
        """
        least_N = log_ratio_N - np.maximum(error_N, SLACK)
        # mixed with 1, so that no factor is below LEAK
        factor_JN = (1 - LEAK) * np.exp(log_density_JN + least_N) + LEAK
        sums_J = np.log(factor_JN).sum(axis=1) + missing * math.log(LEAK)
        return cls(len(log_ratio_N), tuple(sums_J.tolist()), missing)
