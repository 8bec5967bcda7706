# Coherence: the mean weight of tokens drawn from infer cannot be above 1.
#
# Where it is, the sampler's logprobs are not those it drew with: raw beside processed, or of
# other tokens.

from __future__ import annotations

import math

import numpy as np

from servanda.capture import captured, errors
from servanda.rollouts import Array, Rollouts
from servanda.soundness.base import Finding, check
from servanda.stats import Coherence

_LIMIT_NATS = math.log(1e6)  # evidence of a million to one


@check("coherence")
class MeanWeight:
    """Evidence that E w > 1, w = p_train / p_infer, over all trained tokens with both logprobs."""

    def __init__(self) -> None:
        self.evidence = Coherence()
        self.first = ""

    def add(self, rollouts: Rollouts) -> None:
        train_N, infer_N = rollouts.logp_train_N, rollouts.logp_infer_N
        known_N = rollouts.mask_N & ~np.isnan(train_N) & np.isfinite(infer_N) & (train_N < np.inf)
        if not known_N.any():
            return
        train, infer = train_N[known_N], infer_N[known_N]
        error = _error(train) + _error(infer)
        self.evidence += Coherence.of(train - infer, error_N=error)
        if not self.first and self.evidence.log_e >= _LIMIT_NATS:
            self.first = rollouts.source_S[0]

    def finding(self) -> Finding:
        numbers = {"tokens": float(self.evidence.n), "log_e": self.evidence.log_e}
        if not self.evidence.n:
            return Finding("coherence", "warning", "no token to tell the mean weight by", numbers)
        if self.evidence.log_e < _LIMIT_NATS:
            text = (
                "the mean weight is not above 1, as it must be where the sampler's logprobs are "
                "those it drew with (its temperature is not tested by this)"
            )
            return Finding("coherence", "ok", text, numbers)
        text = (
            "the mean weight of the tokens is above 1, which no two distributions have: the "
            "sampler's logprobs are not those it drew with (raw ones, or of other tokens)"
        )
        return Finding("coherence", "unsound", text, numbers, self.first)


def _error(logp_N: Array) -> Array:
    """The most that recording moved each value by."""
    return errors(logp_N, captured(logp_N))
