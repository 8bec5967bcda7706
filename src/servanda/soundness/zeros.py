# Zeros: a logprob that was never recorded and written as 0.0 reads as certainty.
#
# A kernel may be certain of a token, and then the other is nearly so.  Zero on one side and less
# than 1/e on the other is no rounding.

from __future__ import annotations

from servanda.rollouts import Rollouts
from servanda.soundness.base import Finding, First, check, share

FAR_NATS = -1.0
UNSOUND = 0.001


@check("zeros")
class Zeros:
    """Counts trained tokens that are exactly 0 on one side and far below on the other."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = 0
        self.first = First()

    def add(self, rollouts: Rollouts) -> None:
        train_N, infer_N = rollouts.logp_train_N, rollouts.logp_infer_N
        filled_train_N = rollouts.mask_N & (train_N == 0) & (infer_N < FAR_NATS)
        filled_infer_N = rollouts.mask_N & (infer_N == 0) & (train_N < FAR_NATS)
        self.tokens += int(rollouts.mask_N.sum())
        self.train += int(filled_train_N.sum())
        self.infer += int(filled_infer_N.sum())
        self.first.see(rollouts, filled_train_N | filled_infer_N)

    def finding(self) -> Finding:
        filled = self.train + self.infer
        if not filled:
            return Finding("zeros", "ok", "no zero-filled logprobs", {"tokens": 0})
        text = (
            f"{filled:,} trained tokens have a logprob of exactly 0 on one side and below "
            f"{FAR_NATS:g} on the other (trainer {self.train:,}, sampler {self.infer:,}): "
            "missing values that were filled"
        )
        state = "unsound" if share(filled, self.tokens) > UNSOUND else "warning"
        numbers = {"tokens": filled, "train": self.train, "infer": self.infer}
        return Finding("zeros", state, text, numbers, self.first.place)
