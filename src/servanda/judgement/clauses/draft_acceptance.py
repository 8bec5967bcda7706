# The acceptance of drafts in speculative decoding, counted by the rollout engine.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from servanda.judgement.clauses.base import (
    Cell,
    CellVerdict,
    Interim,
    Kind,
    blank,
    limit_of,
)
from servanda.theory.stats.bets import weights_above, weights_below
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.theory.stats.interval import interval

DRAFT_ACCEPTANCE = "draft_acceptance"


@dataclass(frozen=True)
class DraftAcceptance(Kind):
    """Accepted / proposed draft tokens of a training step, by anytime-valid evidence.

    One draft is one unit.  The assumption is `order`: the counted drafts are not selected by their
    outcome.
    """

    counts: ClassVar[bool] = True

    def judge(
        self, cell: Cell, rounds: list[DraftCounts], floor: object, look: Interim
    ) -> CellVerdict:
        drafts, limit = sum(rounds, DraftCounts()), limit_of(cell.clause)
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            limit=limit,
            n=drafts.n,
            units="drafts",
            alpha=look.alpha,
            assumptions=("order",),
        )
        if not drafts.n:
            return verdict.but(note="no draft was counted: pass drafts= to the monitor")
        e_holds = drafts.log_e_above(limit, weights_above(limit))
        e_violated = drafts.log_e_below(limit, weights_below(limit))
        verdict = verdict.but(value=drafts.mean, e_holds=e_holds, e_violated=e_violated)
        if look.intervals:
            verdict = verdict.but(interval=interval(drafts, look.alpha, limit))
        if e_violated >= look.log_price_violated:
            return verdict.but(outcome="violated", note=TOO_FEW_ACCEPTED)
        if e_holds >= look.log_price_holds:
            return verdict.but(outcome="holds")
        return verdict.but(note="too near the limit for this number of drafts")


TOO_FEW_ACCEPTED = (
    "the target accepts fewer draft tokens than declared: likely causes are draft weights that are "
    "not synced, a draft trained on other texts, or drafts accepted without the draft's own "
    "probabilities"
)
