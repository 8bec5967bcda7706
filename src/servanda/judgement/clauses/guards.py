# Validity checks (observability clauses): if one fails, statistical clauses are inconclusive.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from servanda.contract.fields import duration_text
from servanda.judgement.clauses.base import (
    GUARDS,
    Array,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Reads,
    View,
    blank,
    limit_of,
    peak,
)
from servanda.theory.divergence.precision import CAPTURES, captured, errors
from servanda.theory.stats.bets import Coherence, Refutation
from servanda.traces.trace import Trace

# of the log threshold; at a threshold of 5.4 at most one honest run in 25 reaches it (Ville)
_NEAR = 0.6


class _Refuting(Kind):
    """A check that can only reject: `violated` at the threshold of any cell, else satisfied.

    `rejection`: the text of a rejection.
    """

    counts = True
    rejection: ClassVar[str]

    def judge(
        self, cell: Cell, rounds: list[Refutation], floor: object, look: Interim
    ) -> CellVerdict:
        log_e = peak([np.array(r.growth) for r in rounds if r.growth])
        return refuted(cell, sum(rounds, Refutation()), log_e, look, self.rejection)


def refuted(
    cell: Cell,
    whole: Refutation,
    log_e: float,
    look: Interim,
    rejection: str,
    unseen: str = "",
    now: float = -math.inf,
) -> CellVerdict:
    """`violated` with the note `rejection`, otherwise satisfied.

    Args:
        whole: statistic of all rounds; log_e: largest log e-value over prefixes, nats.
        unseen: the reason if the run records nothing that could reject.
        now: the log e-value of all rounds; a run does not end while it is near the threshold.
    """
    verdict = blank(
        cell,
        "inconclusive",
        kind="guard",
        n=whole.n,
        units="tokens",
        missing=whole.missing,
        alpha=look.alpha,
        e_violated=log_e if whole.n else None,
    )
    if log_e >= look.log_price_violated:
        return verdict.but(outcome="violated", note=rejection)
    if unseen and not whole.growth and (whole.n or whole.missing):
        return verdict.but(note=unseen)
    if not whole.n or look.launched < look.first:
        return verdict.but(open=True, more=max(1, look.first - look.launched))
    if now >= _NEAR * look.log_price_violated:
        more = max(1, math.ceil(look.launched * (look.log_price_violated / now - 1)))
        return verdict.but(open=True, more=more, note="near a rejection: more tokens decide")
    return verdict.but(outcome="holds", note="not rejected")


def counted(
    cell: Cell, usable: int, launched: int, units: str = "tokens", **more: Any
) -> CellVerdict:
    """`holds` if the share is at least the limit, otherwise inconclusive."""
    limit = limit_of(cell.clause)
    verdict = blank(cell, "inconclusive", kind="fact", limit=limit, n=launched, units=units, **more)
    if not launched:
        return verdict.but(open=True, note="nothing was measured yet")
    value = usable / launched
    return verdict.but(value=value, outcome="holds" if value >= limit else "inconclusive")


def lost(cell: Cell, view: View) -> int:
    """Largest number of tokens of lost sequences in the slice."""
    return len(view.lost(cell.cut)) * cell.cut.positions(view.width)


@GUARDS.register("coherence")
@dataclass(frozen=True)
class Coherent(_Refuting):
    """Tests whether the logprobs can be those of two distributions: E_infer w <= 1."""

    rejection: ClassVar[str] = (
        "the weights train / infer average above 1, which no two distributions give: raw "
        "logprobs on one side and processed ones on the other, or logprobs of other tokens"
    )
    reads: ClassVar[Reads] = "lower"

    def join(self, counted: Sequence[Coherence]) -> Coherence:
        n, missing = (sum(getattr(c, name) for c in counted) for name in ("n", "missing"))
        growth = zip(*(c.growth for c in counted if c.growth), strict=True)
        return Coherence(n, tuple(map(math.fsum, growth)), missing)

    def weigh(self, cell: Cell, view: View) -> Coherence:
        inside_N = view.mask(cell.cut)
        known_N = inside_N & view.usable_N
        missing = int((inside_N & ~known_N).sum()) + lost(cell, view)
        error_N = errors_of(view.pair.train) + errors_of(view.pair.infer)
        return Coherence.of(view.log_ratio()[known_N], missing, error_N[known_N])


def errors_of(trace: Trace) -> Array:
    """The rounding error bound of each recorded logprob, [N], nats."""
    return errors(trace.columns["logp"], capture_of(trace))


def capture_of(trace: Trace) -> str:
    """The precision of recorded logprobs: as the trace declares, otherwise the coarsest possible.

    The coarsest precision that can represent the values: never finer than the actual one.
    """
    declared = trace.about.get("capture", "")
    return declared if declared in CAPTURES else captured(trace.columns["logp"])


@dataclass(frozen=True)
class Counts:
    usable: int = 0
    launched: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.usable + other.usable, self.launched + other.launched)


@GUARDS.register("kept_ratio")
@dataclass(frozen=True)
class KeptRatio(Kind):
    """Share of the sampled tokens that no filter of the trainer removed before training.

    If the record does not mark removed tokens, the clause does not apply.
    """

    reads: ClassVar[Reads] = "removed"

    def weigh(self, cell: Cell, view: View) -> Counts | None:
        removed_N = view.pair.infer.columns.get("removed")
        if removed_N is None:
            return None
        inside_N = view.mask(cell.cut)
        return Counts(int((inside_N & (removed_N != 1)).sum()), int(inside_N.sum()))

    def judge(
        self, cell: Cell, rounds: list[Counts | None], floor: object, look: Interim
    ) -> CellVerdict:
        known = [counts for counts in rounds if counts is not None]
        if rounds and not known:
            return blank(cell, "not applicable", "nothing says which tokens a filter removed")
        counts = sum(known, Counts())
        verdict = counted(cell, counts.usable, counts.launched)
        if verdict.outcome == "holds" or not counts.launched:
            return verdict
        absent = counts.launched - counts.usable
        note = f"a filter removed {absent:,} of {counts.launched:,} tokens before training"
        return verdict.but(outcome="violated", note=note)


@GUARDS.register("usable_ratio")
@dataclass(frozen=True)
class UsableRatio(Kind):
    """Share of dispatched tokens with a usable logprob on both sides.

    A lost sequence counts with its largest possible number of tokens.
    """

    reads: ClassVar[Reads] = "ratio"

    def weigh(self, cell: Cell, view: View) -> Counts:
        inside_N = view.mask(cell.cut)
        launched = int(inside_N.sum()) + lost(cell, view)
        return Counts(int((inside_N & view.usable_N).sum()), launched)

    def judge(self, cell: Cell, rounds: list[Counts], floor: object, look: Interim) -> CellVerdict:
        counts = sum(rounds, Counts())
        missing = counts.launched - counts.usable
        verdict = counted(cell, counts.usable, counts.launched, missing=missing)
        if verdict.outcome == "holds" or not counts.launched:
            return verdict
        if look.launched < look.first:
            return verdict.but(open=True, more=max(1, look.first - look.launched))
        return verdict.but(
            outcome="error",
            note=f"{missing} of {counts.launched} launched tokens have "
            "no usable logprob (NaN, infinite, or a lost sequence)",
        )


@dataclass(frozen=True)
class Coverage:
    """Requests sent to infer in a window, and those that train scored."""

    scored: int = 0
    served: int = 0


Windows = Mapping[float | None, Coverage]  # seconds of traffic (None: the whole step) -> counts


@GUARDS.register("rescored_ratio")
@dataclass(frozen=True)
class RescoredRatio(Kind):
    """The scoring rate: the share of requests served on a step that train scored.

    Too low a rate is inconclusive, and violations found in the scored requests remain.  It is a
    count, so it takes no share of alpha.
    """

    source = "coverage"
    live_only: ClassVar[str] = "nothing is served offline: it concerns traffic"

    def weigh(self, cell: Cell, windows: Windows) -> Coverage:
        return windows[cell.clause.over]

    def judge(
        self, cell: Cell, rounds: list[Coverage], floor: object, look: Interim
    ) -> CellVerdict:
        counts = rounds[0] if rounds else Coverage()
        over = cell.clause.over
        window = "" if over is None else f" in the last {duration_text(over)}"
        verdict = counted(cell, counts.scored, counts.served, "requests")
        if verdict.outcome == "holds":
            return verdict
        if not counts.served:
            return verdict.but(note=f"infer served no request{window}")
        return verdict.but(
            open=True,
            note=f"{counts.scored:,} of {counts.served:,} requests that infer served{window} were "
            "scored again: log a larger sample of them",
        )
