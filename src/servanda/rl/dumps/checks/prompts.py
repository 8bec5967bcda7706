# Prompts: a loss mask that begins with the sequence covers its prompt, or the dump has none.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, First, check, share
from servanda.traces.rollouts import Rollouts

UNSOUND = 0.001


@check("prompts")
class Prompts:
    """Counts sequences whose very first token is trained."""

    def __init__(self) -> None:
        self.sequences = self.trained = 0
        self.first = First()

    def add(self, rollouts: Rollouts) -> None:
        begins_N = np.zeros(len(rollouts.mask_N), dtype=bool)
        begins_N[rollouts.start_S] = True
        self.sequences += len(rollouts)
        self.trained += int((begins_N & rollouts.mask_N).sum())
        self.first.see(rollouts, begins_N & rollouts.mask_N)

    def finding(self) -> Finding:
        numbers = {"sequences": self.sequences, "trained": self.trained}
        odd = self.trained, self.sequences, UNSOUND
        if not self.trained:
            return Finding("prompts", "ok", "no loss mask covers a prompt", numbers, odd=odd)
        if self.trained == self.sequences:
            text = (
                "every sequence begins with a trained token: the dump has no prompts, or its loss "
                "mask covers them"
            )
            return Finding("prompts", "warning", text, numbers, self.first.place)
        text = (
            f"{self.trained:,} of {self.sequences:,} sequences begin with a trained token: their "
            "loss mask covers the prompt"
        )
        state = "unsound" if share(self.trained, self.sequences) > UNSOUND else "warning"
        return Finding("prompts", state, text, numbers, self.first.place, odd)
