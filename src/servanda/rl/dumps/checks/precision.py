# Precision: the format of each side's recorded logprobs, and the effect of its rounding.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check
from servanda.theory.divergence.precision import CAPTURES, capture_floor, rounded
from servanda.traces.rollouts import Array, Rollouts

_BY_BITS = sorted(CAPTURES, key=CAPTURES.__getitem__)


@check("precision")
class Precision:
    """The coarsest format that represents all logprobs of a side so far."""

    def __init__(self) -> None:
        self.train = self.infer = ""

    def add(self, rollouts: Rollouts) -> None:
        self.train = _finer(self.train, rollouts.logp_train_N[rollouts.mask_N])
        self.infer = _finer(self.infer, rollouts.logp_infer_N[rollouts.mask_N])

    def finding(self) -> Finding:
        if not self.train or not self.infer:
            return Finding("precision", "warning", "no logprob to tell the precision by")
        numbers = {
            "train_bits": float(CAPTURES[self.train]),
            "infer_bits": float(CAPTURES[self.infer]),
        }
        text = f"logprobs recorded in {self.train} (trainer) and {self.infer} (sampler)"
        worse = min(self.train, self.infer, key=CAPTURES.__getitem__)
        if CAPTURES[worse] >= CAPTURES["float32"]:
            return Finding("precision", "ok", text, numbers)
        floor = capture_floor("k3_nats", worse)
        text += f": rounding to {worse} alone gives a k3 of {floor:.1e} nats"
        return Finding("precision", "warning", text, numbers)


def _finer(known: str, logp_N: Array) -> str:
    """The coarsest format, at least as fine as the known one, that represents every value."""
    values = logp_N[np.isfinite(logp_N) & (logp_N != 0)]
    if not len(values):
        return known
    candidates = _BY_BITS[_BY_BITS.index(known) if known else 0 : -1]
    with np.errstate(over="ignore"):  # float16 ends at 65504
        exact = (name for name in candidates if np.array_equal(rounded(values, name), values))
        return next(exact, _BY_BITS[-1])
