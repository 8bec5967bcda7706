# Clauses: the statistics and the judgement of each kind, one file per kind.

# these modules register metrics and validity checks
from servanda.judgement.clauses import (  # noqa: F401
    fidelity,
    gradient,
    guards,
    loss_checks,
    reward_gap,
    sample_ratio,
    self_noise,
    whole_responses,
)
