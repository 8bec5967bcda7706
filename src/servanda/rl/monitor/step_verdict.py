# The verdict on the tokens of a step, or of the steps that are pooled with it, and the likely cause
# of its outcome in one line.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from servanda.contract.identity import EvidenceKey
from servanda.judgement.bitwise import objection, remarks
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE, TOO_FEW_ACCEPTED
from servanda.judgement.evidence import Evidence, Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import BlindSpot, Verdict, judge, unsound
from servanda.rl.dumps import diagnosis
from servanda.rl.dumps.preset import WORKLOAD
from servanda.rl.dumps.steps import TokenSum
from servanda.rl.follow.follow_step import FollowStep
from servanda.rl.monitor import loss
from servanda.rl.monitor.drafts import draft_metrics, notes_on
from servanda.rl.monitor.part import drafts_of, extras_of, weighed_of
from servanda.rl.monitor.ranks import Part
from servanda.rl.monitor.state_file import RunState
from servanda.rl.monitor.step import metrics_of, of_cells, selection
from servanda.rl.monitor.step_pool import PooledSteps, StepPool
from servanda.rl.trend.run_chart import TREND, changed, joined
from servanda.rl.trend.step_scalars import scalars_of
from servanda.theory.stats.draft_counts import DraftCounts

BEFORE_AN_UPDATE = (
    "before the first update: kernels, prompts, logprob mode or another checkpoint, not the sync"
)


@dataclass(frozen=True)
class StepEvidence:
    """What a step is judged on.

    Args:
        digest: of the contract, which takes long to compute; steps: names the steps.
        spots: effects that were not examined.
        wrong: why the data is no evidence; "" if it is.
        trend: the cells of the run's trend.
    """

    plan: Plan
    digest: str
    steps: str
    weighed: Weighed
    spots: Sequence[BlindSpot] = ()
    wrong: str = ""
    trend: tuple[CellVerdict, ...] = ()

    def verdict(self, intervals: bool = True) -> Verdict:
        """The verdict.

        Args:
            intervals: whether intervals and blind spots are computed, which takes long.
        """
        key = EvidenceKey(
            contract=self.digest,
            corpus="",
            train="external",
            infer="external",
            weights=self.steps,
            grade="declared",
        )
        evidence = Evidence(key, self.plan.digest, {(WORKLOAD, 0): self.weighed})
        verdict = judge(self.plan, evidence, intervals=intervals)
        spots = self.spots if intervals else ()
        verdict = replace(verdict, blind_spots=(*verdict.blind_spots, *spots))
        return joined(unsound(verdict, self.wrong) if self.wrong else verdict, self.trend)


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
    red = dict.fromkeys(c.slice for c in violated if c.section not in ("runtime", TREND))
    of_loss = loss.cause_of(verdict.cells)
    likely = of_loss or diagnosis.likely(shown, [*red], sums, None)
    causes = [likely or changed(verdict.cells)]
    if red and not weights and not of_loss:
        causes.append(BEFORE_AN_UPDATE)
    if any(c.metric == DRAFT_ACCEPTANCE for c in violated):
        causes.append(TOO_FEW_ACCEPTED)
    return "; ".join(filter(None, causes))


@dataclass(frozen=True)
class JudgedStep:
    """What a step is judged on, and the verdict.

    Args:
        verdict: without intervals, which take long; `evidence.verdict()` has them.
        pool: the steps that it is about; None: this one alone.
        tokens: trained tokens of this step.
        drafts: what the engines of all ranks counted.
        metrics: of drafts, loss and versions.
        wrong: problems of the data.
        notes: about the data, and about steps that are judged together.
    """

    evidence: StepEvidence
    verdict: Verdict
    pool: PooledSteps | None
    tokens: int
    drafts: DraftCounts
    metrics: dict[str, float]
    wrong: Sequence[str]
    notes: Sequence[str]


class StepJudge:
    """Judges the steps of a run.

    Args:
        digest: of the contract.
        state: of the run: its chart, its first drafts, and the size of its windows are continued.
        first: number of the step before any update.
    """

    def __init__(self, plan: Plan, digest: str, state: RunState, first: int) -> None:
        self._plan, self._digest, self._state, self._first = plan, digest, state, first
        self._pool = StepPool(plan, state.most)

    def of(
        self,
        parts: Sequence[Part],
        groups: Mapping[str, TokenSum],
        weights: int,
        follow: FollowStep | None,
    ) -> JudgedStep:
        """The verdict on the parts of all ranks."""
        plan, state, number = self._plan, self._state, weights + self._first
        own = weighed_of(plan, parts, len(groups))
        drafts, alpha = drafts_of(parts), 1 - plan.contract.confidence
        problems, notes, metrics = extras_of(plan, parts, weights)
        metrics |= draft_metrics(drafts, state.drafts, weights, alpha)
        notes += notes_on(metrics)
        wrong = [problem for part in parts for problem in part.unsound]
        if copied := objection(plan.contract, own.agreement):
            wrong.append(copied)
        else:
            notes += remarks(plan.contract, own.agreement)
        if not own.tokens:
            wrong.append("the mask has no trained token")
        wrong += problems
        spots = blind_spots(own.sequences, sum(p.offered for p in parts), state.left_out)
        evidence = StepEvidence(plan, self._digest, str(weights), own, spots, next(iter(wrong), ""))
        if not wrong:
            evidence = replace(evidence, weighed=self._pool.add(number, own))
            notes += self._pool.notes
        verdict, pool = evidence.verdict(intervals=False), None
        if not wrong:
            pool = self._pool.close(verdict)
        state.most = self._pool.most
        if pool is not None and pool.first < number:
            evidence = replace(evidence, steps=f"{pool.first - self._first}..{weights}")
        if state.chart is not None:
            measured = metrics_of(parts, groups) | metrics | of_cells(verdict)
            measured |= follow.metrics if follow is not None else {}
            values = {} if verdict.outcome == "error" else scalars_of(measured)
            evidence = replace(evidence, trend=state.chart.add(weights, values))
            verdict = joined(verdict, evidence.trend)
        return JudgedStep(evidence, verdict, pool, own.tokens, drafts, metrics, wrong, notes)
