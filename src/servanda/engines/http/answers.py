# The answers of a server as one trace.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from servanda.engines.base import padded_best
from servanda.engines.http import routed_experts
from servanda.engines.http.dialects.base import Answer
from servanda.traces.trace import Batch, Trace


def trace_of(
    batch: Batch,
    answers: Sequence[Answer],
    k: int,
    about: Mapping[str, str],
) -> Trace:
    """What came back as one trace, with the k top-k tokens; NaN where there are fewer."""
    logp_N = np.array([v for a in answers for v in a.logp], dtype=np.float64)
    columns = {"logp": logp_N, **padded_best([step for a in answers for step in a.best], k)}
    lengths, tokens = [len(a.tokens) for a in answers], [t for a in answers for t in a.tokens]
    if batch.salts:
        cached_S = [math.nan if a.cached is None else float(a.cached) for a in answers]
        columns["cached"] = np.repeat(cached_S, lengths)
    columns |= routed_experts.columns([a.routes for a in answers], lengths)
    return Trace.of(batch, lengths, tokens, columns, about)
