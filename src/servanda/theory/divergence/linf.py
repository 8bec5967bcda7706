# The largest logit drift, at the common shift of all logits that makes it smallest.

from __future__ import annotations

from servanda.theory.divergence.base import LogitRows, divergence
from servanda.theory.divergence.osc import logit_osc
from servanda.theory.divergence.pairs import Floats


@divergence(
    "logit_linf_nats",
    needs="logits",
    unit="nat",
    source="min over c of max |drift - c| = osc / 2",
    of_sums=lambda sums: (sums.high - sums.low) / 2,
)
def logit_linf(rows: LogitRows) -> Floats:
    """Largest |train - infer| logit at the common shift that makes it smallest, [R], nats.

    Half of `logit_osc_nats`: a shift of all logits changes no probability, so the plain
    largest difference would be misleading.
    """
    return logit_osc(rows) / 2
