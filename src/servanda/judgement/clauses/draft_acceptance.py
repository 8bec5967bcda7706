# The acceptance of drafts, as the engines of a trainer count it during a step, or the infer kernel
# of a check while it draws.

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from servanda.judgement.clauses.base import (
    Cell,
    CellVerdict,
    Interim,
    Kind,
    View,
    blank,
    limit_of,
)
from servanda.theory.stats.bets import weights_above, weights_below
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.theory.stats.interval import interval
from servanda.traces.drafts import COUNTED

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
        verdict = blank(cell, "inconclusive", **_about(cell, look))
        return _judged(verdict, sum(rounds, DraftCounts()), look, "pass drafts= to the monitor")


@dataclass(frozen=True)
class ServedDrafts(Kind):
    """The same of an infer kernel that counts its drafts while it draws.

    The counts are of all its requests together: there are none by slice or by prompt group.
    """

    counts: ClassVar[bool] = True

    def weigh(self, cell: Cell, view: View) -> DraftCounts:
        told = view.pair.infer.about.get(COUNTED)
        if not told or cell.cut.terms:
            return DraftCounts()
        data = json.loads(told)
        return DraftCounts(**{**data, "by_depth": tuple(data["by_depth"])})

    def judge(
        self, cell: Cell, rounds: list[DraftCounts], floor: object, look: Interim
    ) -> CellVerdict:
        counts = sum(rounds, DraftCounts())
        verdict = blank(cell, "inconclusive", **_about(cell, look), open=True)
        if cell.claim == "realised" or not counts.drafts:
            return _judged(verdict, counts, look, _NOT_COUNTED)
        none = _judged(verdict, DraftCounts(), look, _BY_SERVER)
        return none.but(value=counts.mean, open=False)


_NOT_COUNTED = "let the infer kernel speculate, and run a server that counts its drafts"
_BY_SERVER = (
    "the server counts the drafts of all its requests together, and this claim is about prompt "
    "groups: write claim: realised beside the clause"
)


def _about(cell: Cell, look: Interim) -> dict[str, Any]:
    return {
        "kind": "certificate",
        "limit": limit_of(cell.clause),
        "units": "drafts",
        "alpha": look.alpha,
        "assumptions": ("order",),
    }


def _judged(verdict: CellVerdict, drafts: DraftCounts, look: Interim, lacking: str) -> CellVerdict:
    """The verdict by the evidence of drafts."""
    limit = verdict.limit
    assert limit is not None
    verdict = verdict.but(n=drafts.n)
    if not drafts.n:
        return verdict.but(note=f"no draft was counted: {lacking}")
    e_holds = drafts.log_e_above(limit, weights_above(limit))
    e_violated = drafts.log_e_below(limit, weights_below(limit))
    verdict = verdict.but(value=drafts.mean, e_holds=e_holds, e_violated=e_violated)
    if look.intervals:
        verdict = verdict.but(interval=interval(drafts, look.alpha, limit))
    if e_violated >= look.log_price_violated:
        return verdict.but(outcome="violated", note=TOO_FEW_ACCEPTED, open=False)
    # a trainer's step has no first look
    if e_holds >= look.log_price_holds and (look.launched >= look.first or not verdict.open):
        return verdict.but(outcome="holds", open=False, note=_by_depth(drafts))
    return verdict.but(note="too near the limit for this number of drafts")


def _by_depth(drafts: DraftCounts) -> str:
    if len(drafts.shares) < 2:
        return ""
    shares = ", ".join(f"{share:.1%}" for share in drafts.shares)
    return f"first 1 to {len(drafts.shares)} tokens accepted: {shares} of the drafts"


TOO_FEW_ACCEPTED = (
    "the target accepts fewer draft tokens than declared: likely causes are draft weights that are "
    "not synced, a draft trained on other texts, or drafts accepted without the draft's own "
    "probabilities"
)
