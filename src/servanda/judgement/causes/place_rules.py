# Rules about a place: a slice, some sequences, or a failed check.

from __future__ import annotations

import math

from servanda.judgement.causes.case import (
    FEW_ZEROS,
    MOST_OF_IT,
    RULES,
    Case,
    Rule,
    explains,
    grows,
    rule,
)
from servanda.judgement.causes.gap_shape import WORST
from servanda.judgement.causes.slice_search import FoundSlice
from servanda.judgement.slices.rules import LABEL, modulo

INFRASTRUCTURE = ("replica", "rank", "engine")
_START = 3.0
_SOME = 0.6  # concentration of a gap at the start of some responses, not of all
_OLD = 2.0
_END = 0.2  # share of the tokens that are the end of their responses
_JUMP = 3.0  # of the gap at one length; what grows along the context has less
_FEW_SEQUENCES = 0.75  # of concentration: stale caches .93, FP8 .39, a lost adapter .51


def _problem(*names: str) -> Rule:
    return lambda case: next((case.problems[n] for n in names if n in case.problems), "")


_missing = _problem("coverage", "values", "zeros")


@rule("missing_data")
def _(case: Case) -> str:
    s = case.signatures
    # a cut that leaves one token has a logprob of 0 as well, and moves all other tokens
    cut = s.cut_share >= MOST_OF_IT and s.zeros <= FEW_ZEROS
    return "" if cut and {*case.problems} <= {"zeros"} else _missing(case)


RULES["shift"] = _problem("line_up")
RULES["replay"] = _problem("replay", "routes")
RULES["raw_logprobs"] = _problem("coherence")


@rule("stale_replica")
def _(case: Case) -> str:
    found = _label(case, *INFRASTRUCTURE)
    if found is None or not grows(case.signatures):
        return ""
    return f"its gap grows x{case.signatures.growth:.2g}; {explains(found)}"


@rule("one_engine")
def _(case: Case) -> str:
    found = _label(case, *INFRASTRUCTURE)
    return explains(found) if found else ""


@rule("one_kind")
def _(case: Case) -> str:
    main = case.main
    if main is None or not main.first[0].startswith(LABEL) or _label(case, *INFRASTRUCTURE):
        return ""
    return explains(main)


def _label(case: Case, *names: str) -> FoundSlice | None:
    main = case.main
    first = "" if main is None else main.first[0]
    return main if first.startswith(LABEL) and first.removeprefix(LABEL) in names else None


@rule("old_weights")
def _(case: Case) -> str:
    found, stale = case.sliced("outcome.staleness"), case.signatures.stale
    if stale is None or stale < _OLD or (found is None and case.main is not None):
        return ""
    more = f"; {explains(found)}" if found else ""
    return f"tokens of older weights have x{stale:.2g} the gap of the others{more}"


@rule("retokenised")
def _(case: Case) -> str:
    found = case.sliced("context.turn", "context.turn_position")
    times = case.signatures.turn_start
    if found is None or times is None or times < _START:
        return ""
    return explains(found)


@rule("vocabulary")
def _(case: Case) -> str:
    found = case.sliced("outcome.token_id")
    return explains(found) if found else ""


@rule("end_of_answer")
def _(case: Case) -> str:
    found = case.sliced("outcome.from_end")
    if found is None:  # or the last few positions of the responses
        late = case.sliced("context.position")
        if late is not None and "gte" in late.first[1] and late.tokens <= _END:
            found = late
    return explains(found) if found else ""


@rule("blocks")
def _(case: Case) -> str:
    main = case.main
    if main is None or not any(
        modulo(name)[1] is not None and not name.startswith("context.row") for name in main.match
    ):
        return ""
    return explains(main)


@rule("batch")
def _(case: Case) -> str:
    found = case.sliced("context.row")
    return explains(found) if found else ""


@rule("attention_window")
def _(case: Case) -> str:
    found = case.sliced("context.length", "context.position")
    if found is None or "gte" not in found.first[1]:
        return ""
    if found.outside > found.inside / _JUMP:
        return ""
    edge = found.first[1]["gte"]
    return f"from about {edge:g} tokens on; {explains(found)}"


@rule("padding")
def _(case: Case) -> str:
    found = case.sliced("request.prompt_tokens", "context.length")
    if found is None or "lt" not in found.first[1] or _early(case) is not None:
        return ""
    return explains(found)


@rule("packing")
def _(case: Case) -> str:
    s, found = case.signatures, _early(case)
    if found is None or s.concentration < _SOME:
        return ""
    return f"the first tokens of some responses, x{s.start or math.nan:.2g}; {explains(found)}"


@rule("template")
def _(case: Case) -> str:
    found = _early(case)
    return f"the first tokens of all responses; {explains(found)}" if found else ""


def _early(case: Case) -> FoundSlice | None:
    """The main slice, if it is of the first tokens of responses or turns."""
    for name, conditions in (case.main.match if case.main else {}).items():
        early = "lt" in conditions or conditions.get("in") == [0]
        if name in ("context.position", "context.turn_position") and early:
            return case.main
    return None


@rule("stale_cache")
def _(case: Case) -> str:
    s = case.signatures
    if not grows(s) or s.concentration < _FEW_SEQUENCES:
        return ""
    return (
        f"drift that grows, x{s.growth:.2g}, in few sequences ({100 * s.concentration:.0f} % of "
        f"it in {100 * WORST:.0f} % of the tokens)"
    )


@rule("odd_sequences")
def _(case: Case) -> str:
    odd = case.sequences
    if odd is None or grows(case.signatures):  # of a gap that grows, they are those of late steps
        return ""
    places = f", such as {', '.join(odd.worst)}" if odd.worst else ""
    return (
        f"{100 * odd.sequences:.2g} % of the sequences have {100 * odd.share:.0f} % of the "
        f"excess{places}"
    )
