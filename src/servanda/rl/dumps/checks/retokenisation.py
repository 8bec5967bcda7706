# Re-tokenised turns: text that was tokenised differently after a tool call.
#
# The sampler scored its own tokens, the trainer the new ones, so the two differ strongly at the
# beginning of a turn.  To exclude a kernel that differs everywhere, the share is compared with that
# of all other tokens.

from __future__ import annotations

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import Finding, FirstPlace, Sums, check, heads, share
from servanda.traces.rollouts import Rollouts

FAR_NATS = 4.0
TIMES = 10  # smallest ratio of the rate at the head of a turn to that elsewhere


@check("retokenised")
class Retokenised(Sums):
    """Counts heads of second and later turns at which the sides differ by more than 4 nats."""

    def __init__(self) -> None:
        self.turns = self.suspects = self.sequences = 0
        self.head = self.head_far = self.rest = self.rest_far = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        at_TH, tokens = heads(rollouts), len(rollouts.trained_K)
        far_K = np.abs(rollouts.ratio_K) > FAR_NATS
        if far_K.any():  # a value that was not recorded is no sign of another token (see `zeros`)
            far_K &= (rollouts.train_K != 0) & (rollouts.infer_K != 0)
        head_TH = at_TH >= 0
        hit_TH = head_TH & far_K[at_TH] if len(at_TH) else head_TH
        head, head_far = int(head_TH.sum()), int(hit_TH.sum())
        self.turns += len(at_TH)
        self.head += head
        self.head_far += head_far
        self.rest += tokens - head
        self.rest_far += int(np.count_nonzero(far_K)) - head_far
        if head_far:
            self.suspects += int(hit_TH.any(axis=1).sum())
            hit_K = rollouts.trained_K[at_TH[hit_TH]]
            self.sequences += len(np.unique(rollouts.sequence_of(hit_K)))
            self.first.add_token(rollouts, int(at_TH[hit_TH][0]))

    def finding(self) -> Finding:
        numbers = {
            "turns": self.turns,
            "suspects": self.suspects,
            "sequences": self.sequences,
            "elsewhere": share(self.rest_far, self.rest),
        }
        if not self.turns:
            text = "no sequence has a second turn, so no turn can be re-tokenised"
            return Finding("retokenised", "ok", text, numbers)
        # add one token elsewhere, to avoid a division by 0
        usual = (self.rest_far + 1) / (self.rest + 1)
        if not self.suspects or share(self.head_far, self.head) <= TIMES * usual:
            text = (
                f"no gross re-tokenisation: at the start of {count(self.turns, 'later turn')}, "
                f"differences above {FAR_NATS:g} nats are not much more frequent than elsewhere"
            )
            return Finding("retokenised", "ok", text, numbers)
        text = (
            f"{self.suspects:,} of {count(self.turns, 'later turn')}, in "
            f"{count(self.sequences, 'sequence')}, "
            f"begin with tokens whose logprobs differ by more than {FAR_NATS:g} nats: "
            "re-tokenised at a tool boundary?"
        )
        return Finding("retokenised", "warning", text, numbers, self.first.place)
