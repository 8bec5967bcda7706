# The verdict on a step's evidence, and the likely cause of its outcome in one line.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE, NOT_SYNCED
from servanda.judgement.evidence import Evidence
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import BlindSpot, Verdict, judge, unsound
from servanda.rl.dumps import diagnosis
from servanda.rl.monitor import loss
from servanda.rl.monitor.step import selection

BEFORE_AN_UPDATE = (
    "before the first update: kernels, prompts, logprob mode or another checkpoint, not the sync"
)


def verdict_of(
    plan: Plan,
    evidence: Evidence,
    wrong: Sequence[str],
    spots: Sequence[BlindSpot],
    *,
    intervals: bool = True,
) -> Verdict:
    """The verdict; an error on invalid data.

    Args:
        wrong: problems of the data.
        spots: further effects that were not examined.
        intervals: False omits them, and the blind spots, for an evaluation that only decides.
    """
    verdict = judge(plan, evidence, intervals=intervals)
    if intervals:
        verdict = replace(verdict, blind_spots=(*verdict.blind_spots, *spots))
    return unsound(verdict, wrong[0]) if wrong else verdict


def blind_spots(judged: int, offered: int, left_out: Sequence[str]) -> list[BlindSpot]:
    """The sequences that were not scored, and the omitted slices."""
    share = [BlindSpot("sample", selection(judged, offered))] if offered > judged else []
    return [*share, *(BlindSpot("slice", text) for text in left_out)]


def cause_of(
    verdict: Verdict,
    wrong: Sequence[str],
    shown: Sequence[Cut],
    sums: diagnosis.Atoms,
    weights: int,
) -> str:
    """The likely cause of the violated cells, or the problem of the data; "" if none.

    Args:
        wrong: problems of the data.
        shown: the slices, in the order of the bits of `sums`.
        weights: number of updates of the trainer.
    """
    if verdict.outcome == "error":
        failed = (c for c in verdict.cells if c.enforced and c.outcome == "error")
        return wrong[0] if wrong else next((c.note for c in failed), "")
    violated = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    red = dict.fromkeys(c.slice for c in violated if c.section != "runtime")
    of_loss = loss.cause_of(verdict.cells)
    causes = [of_loss or diagnosis.likely(shown, [*red], sums, None)]
    if red and not weights and not of_loss:
        causes.append(BEFORE_AN_UPDATE)
    if any(c.metric == DRAFT_ACCEPTANCE for c in violated):
        causes.append(NOT_SYNCED)
    return "; ".join(filter(None, causes))
