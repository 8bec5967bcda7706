"""Pairs of statements about one dump that cannot both be true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from servanda.contract.model import WHOLE
from servanda.judgement.causes.catalogue import OF_CHECKS, RAW, UNEXPLAINED
from servanda.judgement.causes.gap_cause import UNEVEN
from servanda.judgement.causes.gap_shape import EXACT
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict

_ENGINE, _TRAINER = ("one_engine", "stale_replica"), ("one_rank",)
_WITH_A_CHECK = {*OF_CHECKS.values(), *EXACT, RAW, "top_p", UNEXPLAINED}


def contradictions(verdict: Verdict) -> list[str]:
    """The pairs that a verdict states both of."""
    return [pair for pair, states in LAW.items() if states(verdict)]


def _cause(verdict: Verdict) -> str:
    return verdict.advice.name if verdict.advice is not None else ""


def _text(verdict: Verdict) -> str:
    return verdict.advice.cause if verdict.advice is not None else ""


def _means(verdict: Verdict) -> Iterator[CellVerdict]:
    for cell in verdict.cells:
        if cell.enforced and cell.metric in ("tv", "weight_gap") and cell.interval is not None:
            yield cell


def _differs(verdict: Verdict) -> bool:
    """Whether a violated slice is above the rest of the tokens, whatever their sampling error."""
    whole = max(
        (c.interval[1] for c in _means(verdict) if c.slice == WHOLE and c.interval), default=0.0
    )
    return any(
        cell.slice != WHOLE
        and cell.outcome == "violated"
        and cell.interval is not None
        and 0 < UNEVEN * whole < cell.interval[0]
        for cell in _means(verdict)
    )


def _one_step(verdict: Verdict) -> bool:
    slices = verdict.advice.slices if verdict.advice is not None else ()
    return any(one.entry.startswith("step ") and " from " not in one.entry for one in slices)


def _rest(verdict: Verdict) -> bool:
    """Whether the tokens outside the one place that is named are beyond the limit."""
    advice = verdict.advice
    limits = [cell.limit for cell in _means(verdict) if cell.slice == WHOLE and cell.limit]
    if advice is None or not advice.named or len(advice.slices) != 1 or not limits:
        return False
    if "more remains" in advice.cause or "gap above noise is there" not in advice.cause:
        return False
    rest = advice.slices[0].rest
    return rest.low is not None and rest.low > max(limits)


LAW: Mapping[str, Callable[[Verdict], bool]] = {
    "the gap is alike everywhere; a violated slice has more than the others": lambda v: (
        "alike at equal probability" in _text(v) and _differs(v)
    ),
    "the gap grows over the steps; it is in one step": lambda v: (
        _cause(v) == "stale_weights" and _one_step(v)
    ),
    "a check of the data has failed; the cause is one of sound data": lambda v: (
        v.outcome == "error" and _cause(v) not in {"", *_WITH_A_CHECK}
    ),
    "the cause is a rank of the trainer; it is a replica of the engine": lambda v: (
        (_cause(v) in _ENGINE and "rank" in _text(v).partition(":")[0])
        or (_cause(v) in _TRAINER and "replica" in _text(v).partition(":")[0])
    ),
    "a cause of a gap; no mean over tokens is violated, and no check has failed": lambda v: (
        bool(_cause(v)) and v.outcome not in ("violated", "error")
    ),
    "the gap is in one place; the tokens outside it are beyond the limit": _rest,
}
