# The acceptance of drafts, as the engines of a trainer count it during a step, or the infer kernel
# of a check while it draws.

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

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
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.interval import interval
from servanda.traces.drafts import ACCEPTED, COUNTED, DRAFTED

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
class DrawnDrafts:
    """The drafts of one round in a slice.

    Args:
        counts: of all of them; a server's own, if it counts them by itself.
        groups: by prompt group, with a draft token as unit; None if they are not known by sequence.
    """

    counts: DraftCounts = field(default=DraftCounts())
    groups: GroupRatio | None = None


@dataclass(frozen=True)
class ServedDrafts(Kind):
    """The same of the infer kernel's own draws, by slice.

    A draft belongs to the slice of its first token.  Of a population the unit is the prompt group,
    and a lost sequence counts against both answers.

    Args:
        longest: most tokens of a draft; 0 where a server is set by others.
    """

    longest: int = 0
    counts: ClassVar[bool] = True

    def weigh(self, cell: Cell, view: View) -> DrawnDrafts:
        infer = view.pair.infer
        if DRAFTED not in infer.columns:
            told = infer.about.get(COUNTED)
            return DrawnDrafts(_told(json.loads(told)) if told and not cell.cut.terms else NONE)
        drafted_N = np.nan_to_num(infer.columns[DRAFTED]).astype(np.int64)
        begins_N = (drafted_N > 0) & view.mask(cell.cut)
        size_D = drafted_N[begins_N]
        accepted_D = infer.columns[ACCEPTED][begins_N].astype(np.int64)
        by_depth = tuple(int((accepted_D >= d).sum()) for d in range(1, self.longest + 1))
        counts = DraftCounts(
            len(size_D), int(size_D.sum()), int(accepted_D.sum()), by_depth, self.longest
        )
        return DrawnDrafts(counts, self._groups(cell, view, begins_N, size_D, accepted_D))

    def _groups(self, cell: Cell, view: View, begins_N: Any, size_D: Any, yes_D: Any) -> GroupRatio:
        groups, group_D = view.launched, view.group_N[begins_N]
        total_G, proposed_G = (np.bincount(group_D, of, groups) for of in (yes_D, size_D))
        room = cell.cut.positions(view.width) * self.longest
        missing_G = room * np.bincount(view.group_S[view.lost(cell.cut)], minlength=groups)
        met_G = (proposed_G > 0) | (missing_G > 0)
        return GroupRatio(
            *(cell.capacity * self.longest, view.launched),
            total_G[met_G].astype(np.float64),
            proposed_G[met_G].astype(np.int64),
            missing_G[met_G],
        )

    def judge(
        self, cell: Cell, rounds: list[DrawnDrafts], floor: object, look: Interim
    ) -> CellVerdict:
        counts = sum((r.counts for r in rounds), DraftCounts())
        verdict = blank(cell, "inconclusive", **_about(cell, look), open=True)
        if cell.claim == "realised" or not counts.drafts:
            return _judged(verdict, counts, look, _NOT_COUNTED)
        groups = [r.groups for r in rounds if r.groups is not None]
        if not groups:
            return _judged(verdict, DraftCounts(), look, _BY_SERVER).but(
                value=counts.mean, open=False
            )
        process = GroupRatio.join(groups[0].capacity, groups)
        verdict = verdict.but(units="prompt groups", assumptions=("order", "independent"))
        return _judged(verdict, process, look, _NOT_COUNTED).but(missing=process.missing)


NONE = DraftCounts()
_NOT_COUNTED = "let the infer kernel speculate, and run a server that counts its drafts"
_BY_SERVER = (
    "the server counts the drafts of all its requests together, and this claim is about prompt "
    "groups: write claim: realised beside the clause"
)


def _told(data: dict[str, Any]) -> DraftCounts:
    return DraftCounts(**{**data, "by_depth": tuple(data["by_depth"])})


def _about(cell: Cell, look: Interim) -> dict[str, Any]:
    return {
        "kind": "certificate",
        "limit": limit_of(cell.clause),
        "units": "drafts",
        "alpha": look.alpha,
        "assumptions": ("order",),
    }


def _judged(
    verdict: CellVerdict, drafts: DraftCounts | GroupRatio, look: Interim, lacking: str
) -> CellVerdict:
    """The verdict by the evidence of drafts, or of prompt groups."""
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
    units = "drafts" if isinstance(drafts, DraftCounts) else "prompt groups"
    return verdict.but(note=f"too near the limit for this number of {units}")


def _by_depth(drafts: DraftCounts | GroupRatio) -> str:
    if not isinstance(drafts, DraftCounts) or len(drafts.shares) < 2:
        return ""
    shares = ", ".join(f"{share:.1%}" for share in drafts.shares)
    return f"first 1 to {len(drafts.shares)} tokens accepted: {shares} of the drafts"


TOO_FEW_ACCEPTED = (
    "the target accepts fewer draft tokens than declared: likely causes are draft weights that are "
    "not synced, a draft trained on other texts, or drafts accepted without the draft's own "
    "probabilities"
)
