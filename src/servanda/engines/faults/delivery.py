# Faults of delivery: some dispatched sequences do not return.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from servanda.engines.faults.base import Between, fault
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.trace import Batch, Trace


@fault(
    "lost_sequences",
    "A share `value` of the full-length sequences times out; a shorter one less often.",
    default=0.05,
    takes=Between(0, 1),
    seen="NVIDIA-NeMo/RL#4218: what did not come back was read as the logprob 0.0, certainty",
    strengths=(0.001, 0.005, 0.05),
)
def lost_sequences(base: Any, value: float) -> Any:
    class Lossy(base):
        def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
            trace = super().generate(batch, sampling, seed)
            luck_S = np.array([uniforms(seed, "fault", s, 1)[0] for s in batch.sequence_S])
            lost_S = luck_S < float(value) * trace.length_S / batch.width
            keep_N = np.repeat(~lost_S, trace.length_S)
            return replace(
                trace,
                length_S=np.where(lost_S, 0, trace.length_S),
                lost_S=lost_S,
                token_N=trace.token_N[keep_N],
                columns={name: column[keep_N] for name, column in trace.columns.items()},
            )

    return Lossy
