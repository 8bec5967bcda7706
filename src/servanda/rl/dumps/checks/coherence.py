# Coherence: the mean importance weight of tokens sampled from infer cannot exceed 1.
#
# If it does, the sampler's logprobs are not those it sampled with: raw instead of processed, or of
# other tokens.  Two cases are separated.  Re-tokenised turns have logprobs of other tokens only at
# their beginning, so the first tokens of later turns are tested separately.  And a mean above 1 by
# less than 0.001 does not affect a verdict: a float32 softmax over a large vocabulary has an error
# of about 1e-5 nats, and a filter by reward biases the remaining tokens.

from __future__ import annotations

import math

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check, heads
from servanda.theory.divergence.precision import captured, errors
from servanda.theory.stats.coherence import Coherence
from servanda.traces.rollouts import Array, Rollouts

_LIMIT_NATS = math.log(1e6)  # e-value threshold of one million
_GROSS_NATS = 1e-3


@check("coherence")
class MeanWeight:
    """Evidence that E w > 1, w = p_train / p_infer, over all trained tokens with both logprobs.

    `fine` covers all tokens as recorded; `heads` and `rest` cover the first tokens of later turns
    and all others, with each weight reduced by 0.001.
    """

    def __init__(self) -> None:
        self.fine, self.heads, self.rest = Coherence(), Coherence(), Coherence()
        self.first = ""
        self.weight, self.weighed = 0.0, 0

    def add(self, rollouts: Rollouts) -> None:
        train_N, infer_N = rollouts.logp_train_N, rollouts.logp_infer_N
        known_N = rollouts.mask_N & ~np.isnan(train_N) & np.isfinite(infer_N) & (train_N < np.inf)
        if not known_N.any():
            return
        train_K, infer_K, head_K = train_N[known_N], infer_N[known_N], heads(rollouts)[known_N]
        self.weight += float(np.exp(train_K - infer_K).sum())
        self.weighed += len(train_K)
        ratio_K, error_K = train_K - infer_K, _error(train_K) + _error(infer_K)
        gross_K = np.maximum(error_K, _GROSS_NATS)
        self.fine += Coherence.of(ratio_K, error_N=error_K)
        self.rest += Coherence.of(ratio_K[~head_K], error_N=gross_K[~head_K])
        if head_K.any():
            self.heads += Coherence.of(ratio_K[head_K], error_N=gross_K[head_K])
        if not self.first and max(self.rest.log_e, self.heads.log_e) >= _LIMIT_NATS:
            # the sequence with the largest contribution in the chunk that reaches the threshold
            above_S = np.bincount(rollouts.sequence_N[known_N], np.expm1(np.minimum(ratio_K, 50.0)))
            self.first = rollouts.source_S[int(above_S.argmax())]

    def finding(self) -> Finding:
        numbers = {"tokens": float(self.fine.n), "log_e": self.fine.log_e}
        if self.weighed and math.isfinite(self.weight):
            numbers["mean"] = self.weight / self.weighed
        if not self.fine.n:
            return Finding(
                "coherence",
                "warning",
                "no token to compute the mean importance weight from",
                numbers,
            )
        if self.rest.log_e >= _LIMIT_NATS:
            text = (
                "the mean importance weight is above 1, which is impossible for two distributions: "
                "the sampler's logprobs are not those it sampled with (raw, or of other tokens)"
            )
            return Finding("coherence", "unsound", text, numbers, self.first)
        if self.heads.log_e >= _LIMIT_NATS:
            text = (
                "the mean importance weight is above 1 only at the first tokens of later turns: "
                "the logprobs there are of other tokens (re-tokenised at a tool boundary?)"
            )
            return Finding("coherence", "warning", text, numbers, self.first)
        if self.fine.log_e >= _LIMIT_NATS:
            text = (
                "the mean importance weight is above 1 by less than a thousandth: the sides are "
                "swapped, or sequences were selected by their outcome"
            )
            return Finding("coherence", "warning", text, numbers)
        text = (
            "no evidence that the mean importance weight is above 1 (a small excess is sampling "
            "noise): the sampler seems to record the logprobs it sampled with (this does not test "
            "its temperature)"
        )
        return Finding("coherence", "ok", text, numbers)


def _error(logp_N: Array) -> Array:
    """The rounding error bound of each recorded value."""
    return errors(logp_N, captured(logp_N))
