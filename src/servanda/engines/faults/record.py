# Faults of the record: the right tokens, with numbers that belong to others.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from servanda.engines.faults.base import fault
from servanda.engines.faults.values import Between
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace


@fault(
    "off_by_one_shift",
    "Each token carries the logprob of the token `value` places later in its sequence.",
    default=1,
    takes=Between(1, 1000, whole=True),
    seen="AI-Hypercomputer/maxtext#2103 and modelscope/ms-swift#8196: logprobs one position away "
    "from the tokens they are compared on",
    field=1,
    field_source="one place",
)
def off_by_one_shift(base: Any, value: int) -> Any:
    class Shifted(base):
        def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
            return _shifted(super().generate(batch, sampling, seed), value)

        def score(self, batch: Batch, sampling: Sampling, path: Any) -> Trace:
            return _shifted(super().score(batch, sampling, path), value)

    return Shifted


def _shifted(trace: Trace, value: int) -> Trace:
    """The trace with the whole record moved; the last tokens of a sequence repeat its end."""
    end_N = np.repeat(trace.length_S.cumsum(), trace.length_S) - 1
    from_N = np.minimum(np.arange(len(end_N)) + value, end_N)
    return replace(trace, columns={name: column[from_N] for name, column in trace.columns.items()})
