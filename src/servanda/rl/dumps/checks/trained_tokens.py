# Trained: sequences that the trainer learns nothing from.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check, share
from servanda.traces.rollouts import Rollouts

WARN = 0.5


@check("trained")
class Trained:
    """Counts sequences without a trained token: filtered ones, or a broken mask."""

    def __init__(self) -> None:
        self.sequences = self.empty = self.removed = 0
        self.first = ""

    def add(self, rollouts: Rollouts) -> None:
        counts_S = np.bincount(rollouts.sequence_N[rollouts.mask_N], minlength=len(rollouts))
        self.sequences += len(rollouts)
        self.empty += int((counts_S == 0).sum())
        if rollouts.removed_N is not None:
            told_N = np.isfinite(rollouts.logp_train_N) & np.isfinite(rollouts.logp_infer_N)
            scored_N = rollouts.removed_N & told_N
            self.removed += len(np.unique(rollouts.sequence_N[scored_N]))
        if not self.first and (counts_S == 0).any():
            self.first = rollouts.source_S[int((counts_S == 0).argmax())]

    def finding(self) -> Finding:
        numbers = {"sequences": self.sequences, "empty": self.empty}
        if not self.empty:
            return Finding("trained", "ok", "every sequence has trained tokens", numbers)
        text = f"{self.empty:,} of {self.sequences:,} sequences have no trained token"
        if self.removed:
            numbers["removed"] = self.removed
            text += f"; of {self.removed:,} both logprobs are there: a filter removed them"
        state = "warning" if share(self.empty, self.sequences) > WARN else "ok"
        return Finding("trained", state, text, numbers, self.first)
