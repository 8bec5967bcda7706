# Re-tokenised turns: text that was tokenised differently after a tool call.
#
# The sampler scored its own tokens, the trainer the new ones, so the two differ strongly at the
# beginning of a turn.  To exclude a kernel that differs everywhere, the share is compared with that
# of all other tokens.

from __future__ import annotations

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import Finding, FirstPlace, check, heads, share
from servanda.traces.rollouts import Rollouts

FAR_NATS = 4.0
TIMES = 10  # smallest ratio of the rate at the head of a turn to that elsewhere


@check("retokenised")
class Retokenised:
    """Counts heads of second and later turns at which the sides differ by more than 4 nats."""

    def __init__(self) -> None:
        self.turns = self.suspects = self.sequences = 0
        self.head = self.head_far = self.rest = self.rest_far = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        turn_N, head_N = rollouts.turn_N, heads(rollouts)
        with np.errstate(invalid="ignore"):
            far_N = np.abs(rollouts.logp_train_N - rollouts.logp_infer_N) > FAR_NATS
        # a value that was not recorded is no sign of another token (see `zeros`)
        far_N &= rollouts.mask_N & (rollouts.logp_train_N != 0) & (rollouts.logp_infer_N != 0)
        rest_N = rollouts.mask_N & ~head_N
        hit_N = head_N & far_N
        self.turns += int(((turn_N >= 2) & (rollouts.turn_token_N == 0)).sum())
        places = np.stack([rollouts.sequence_N[hit_N], turn_N[hit_N]])
        self.suspects += np.unique(places, axis=1).shape[1]
        self.sequences += len(np.unique(places[0]))
        self.head += int(head_N.sum())
        self.head_far += int(hit_N.sum())
        self.rest += int(rest_N.sum())
        self.rest_far += int((rest_N & far_N).sum())
        self.first.add(rollouts, hit_N)

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
