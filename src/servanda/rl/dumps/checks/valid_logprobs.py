# Values that a logprob cannot have.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, Sums, check
from servanda.traces.rollouts import Rollouts

_ROUNDING_NATS = 1e-3  # rounding error of a fused kernel in bfloat16 above 0


@check("values")
class Values(Sums):
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
        self.tokens += len(rollouts.trained_K)
        for side, logp_K in zip(self.sides, (rollouts.train_K, rollouts.infer_K), strict=True):
            odd_K = (logp_K > _ROUNDING_NATS) | (logp_K == -np.inf)
            if not odd_K.any():
                continue
            found = logp_K[odd_K]
            infinite, above = np.isinf(found), found[np.isfinite(found)]
            self.infinite += int(infinite.sum())
            if side == "sampler":
                self.impossible += int((found < 0).sum())
            self.above += len(above)
            self.sides[side] += len(above)
            self.highest = max(self.highest, float(above.max(initial=-np.inf)))
            self.first.add(rollouts, odd_K)

    def join(self, later: Values) -> None:
        highest = max(self.highest, later.highest)
        super().join(later)
        self.highest = highest

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
