# Logprob coverage: the share of trained tokens with both logprobs.  Absent is not zero.

from __future__ import annotations

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import Finding, FirstPlace, check, share
from servanda.traces.rollouts import Rollouts

WARN, UNSOUND = 0.9999, 0.999


@check("coverage")
class Coverage:
    """Counts trained tokens without a logprob; NaN is missing, an infinity is a value."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = self.both = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        mask_N = rollouts.mask_N
        train_N, infer_N = ~np.isnan(rollouts.logp_train_N), ~np.isnan(rollouts.logp_infer_N)
        self.tokens += int(mask_N.sum())
        self.train += int((mask_N & train_N).sum())
        self.infer += int((mask_N & infer_N).sum())
        self.both += int((mask_N & train_N & infer_N).sum())
        self.first.add(rollouts, mask_N & ~(train_N & infer_N))

    def finding(self) -> Finding:
        if not self.tokens:
            return Finding("coverage", "unsound", "the dump has no trained token")
        covered = share(self.both, self.tokens)
        tokens = count(self.tokens, "trained token")
        text = f"both logprobs present on {100 * covered:.2f} % of {tokens}"
        if self.both < self.tokens:
            text = (
                f"both logprobs present on {self.both:,} of {tokens} "
                f"(the trainer's on {self.train:,}, the sampler's on {self.infer:,})"
            )
        state = "unsound" if covered < UNSOUND else "warning" if covered < WARN else "ok"
        numbers = {"tokens": self.tokens, "both": self.both, "share": covered}
        return Finding("coverage", state, text, numbers, self.first.place)
