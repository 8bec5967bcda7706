# Clauses: how each kind is weighed and judged, one file a kind.

# these register their metrics and guards
from servanda.judgement.clauses import (  # noqa: F401
    clip_ratio,
    fidelity,
    gradient,
    guards,
    reward_gap,
    self_noise,
    sequences,
    support,
)
