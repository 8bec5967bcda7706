# The decision: from signatures and slices to a cause, or to none.
#
# The first rule that fits names the cause: a failed check comes first, then a place or a transform,
# then what only fits the shape.  Each rule returns its evidence, with numbers, or "".  The
# thresholds were chosen on some models and strengths and tested on others (benchmarks/causes.py).

from __future__ import annotations

from servanda.judgement.causes import place_rules, shape_rules  # noqa: F401 - they register
from servanda.judgement.causes.case import RULES, Case
from servanda.judgement.causes.catalogue import CAUSES, UNEXPLAINED, Cause
from servanda.judgement.causes.gap_shape import WORST, Signatures

ORDER = (
    *("missing_data", "shift", "replay", "raw_logprobs"),
    *("stale_replica", "one_engine", "one_kind", "old_weights", "retokenised"),
    *("top_p", "temperature", "penalty"),
    *("vocabulary", "end_of_answer", "blocks", "stale_cache", "batch", "attention_window"),
    *("padding", "packing", "template", "odd_sequences", "precision_drift", "stale_weights"),
    *("positions", "routing", "softcap", "head", "numerics"),
)


def causes_of(case: Case) -> list[tuple[Cause, str]]:
    """The causes that fit, most likely first, with their evidence; `unexplained` if none does."""
    found = [(CAUSES[name], text) for name in ORDER if (text := RULES[name](case))]
    return found or [(CAUSES[UNEXPLAINED], _measured(case.signatures))]


def _measured(s: Signatures) -> str:
    grown = f", x{s.growth:.2g} over the steps" if s.growth is not None else ""
    return (
        f"{100 * s.tail:.0f} % of the gap in 1 % of the tokens, {100 * s.concentration:.0f} % in "
        f"the sequences with {100 * WORST:.0f} % of them{grown}; no signature fits"
    )
