# Values that a logprob cannot have.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, check
from servanda.traces.rollouts import Rollouts

_ROUNDING_NATS = 1e-3  # rounding error of a fused kernel in bfloat16 above 0


@check("values")
class Values:
    """Counts logprobs of trained tokens that are infinite or above 0.

    An importer converts a number below -10,000, which no softmax gives, to -inf.
    """

    def __init__(self) -> None:
        self.tokens = self.above = self.infinite = 0
        self.impossible = 0  # sampled tokens with reported probability 0
        self.sides = {"trainer": 0, "sampler": 0}
        self.highest = -np.inf
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        self.tokens += int(rollouts.mask_N.sum())
        of = zip(self.sides, (rollouts.logp_train_N, rollouts.logp_infer_N), strict=True)
        for side, logp_N in of:
            infinite_N = rollouts.mask_N & np.isinf(logp_N)
            above_N = rollouts.mask_N & np.isfinite(logp_N) & (logp_N > _ROUNDING_NATS)
            self.infinite += int(infinite_N.sum())
            if side == "sampler":
                self.impossible += int((infinite_N & (logp_N < 0)).sum())
            self.above += int(above_N.sum())
            self.sides[side] += int(above_N.sum())
            self.highest = max(self.highest, float(logp_N[above_N].max(initial=-np.inf)))
            self.first.add(rollouts, infinite_N | above_N)

    def finding(self) -> Finding:
        numbers = {
            "above": self.above,
            "infinite": self.infinite,
            "impossible": self.impossible,
        }
        if not self.above and not self.infinite:
            return Finding("values", "ok", "every logprob is finite and at most 0", numbers)
        parts = []
        if self.above:
            sides = ", ".join(f"{side} {n:,}" for side, n in self.sides.items() if n)
            part = f"{self.above:,} logprobs are above 0 ({sides}; up to {self.highest:.3g} nats)"
            turned = max(self.sides.values()) > self.tokens / 2
            parts.append(f"{part}: losses, which have the other sign?" if turned else part)
        if self.impossible:
            parts.append(
                f"the sampler gives {self.impossible:,} of its own tokens a logprob of -inf or "
                "below -10,000: they count as missing, and their weights are infinite"
            )
        if others := self.infinite - self.impossible:
            parts.append(f"{others:,} {'more ' if parts else 'logprobs '}are infinite")
        state = "unsound" if self.above else "warning"
        return Finding("values", state, ", ".join(parts), numbers, self.first.place)
