# Logprob coverage: the share of trained tokens with both logprobs.  Absent is not zero.

from __future__ import annotations

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import Finding, FirstPlace, Sums, check, share
from servanda.traces.rollouts import Rollouts

WARN, UNSOUND = 0.9999, 0.999


@check("coverage")
class Coverage(Sums):
    """Counts trained tokens without a logprob; NaN is missing, an infinity is a value."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = self.both = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        train_K, infer_K = np.isnan(rollouts.train_K), np.isnan(rollouts.infer_K)
        missing_K, tokens = train_K | infer_K, len(train_K)
        self.tokens += tokens
        self.train += tokens - int(np.count_nonzero(train_K))
        self.infer += tokens - int(np.count_nonzero(infer_K))
        self.both += tokens - int(np.count_nonzero(missing_K))
        self.first.add(rollouts, missing_K)

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
