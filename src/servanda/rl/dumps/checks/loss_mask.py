# The loss mask: a mask that begins with the sequence covers the prompt, or the dump has no prompts;
# and sequences without trained tokens.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, Sums, check, share
from servanda.traces.rollouts import Rollouts

UNSOUND = 0.001  # share of sequences that begin with a trained token
WARN = 0.5  # share of sequences without a trained token


@check("prompts", needs="texts", asks="whether the loss mask covers a prompt")
class Prompts(Sums):
    """Counts sequences whose first token is trained."""

    def __init__(self) -> None:
        self.sequences = self.trained = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        begins_S = rollouts.length_S > 0
        begins_S[begins_S] = rollouts.mask_N[rollouts.start_S[begins_S]]
        self.sequences += len(rollouts)
        self.trained += int(begins_S.sum())
        self.first.add_sequence(rollouts, begins_S)

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


@check("trained", needs="rows")
class Trained(Sums):
    """Counts sequences without a trained token: filtered ones, or a broken mask."""

    def __init__(self) -> None:
        self.sequences = self.empty = self.removed = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        empty_S = rollouts.trained_S == 0
        self.sequences += len(rollouts)
        self.empty += int(empty_S.sum())
        self.first.add_sequence(rollouts, empty_S)
        if rollouts.removed_N is not None:
            told_N = np.isfinite(rollouts.logp_train_N) & np.isfinite(rollouts.logp_infer_N)
            scored_N = rollouts.removed_N & told_N
            self.removed += len(np.unique(rollouts.sequence_N[scored_N]))

    def finding(self) -> Finding:
        numbers = {"sequences": self.sequences, "empty": self.empty}
        if not self.empty:
            return Finding("trained", "ok", "every sequence has trained tokens", numbers)
        text = f"{self.empty:,} of {self.sequences:,} sequences have no trained token"
        if self.removed:
            numbers["removed"] = self.removed
            text += f"; {self.removed:,} of them have both logprobs: a filter removed them"
        state = "warning" if share(self.empty, self.sequences) > WARN else "ok"
        return Finding("trained", state, text, numbers, self.first.place)
