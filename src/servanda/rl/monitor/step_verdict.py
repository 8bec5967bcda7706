# The verdict on a step of a monitor, from the parts of all ranks, and its likely cause in one line.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from servanda.judgement.bitwise import objection, remarks
from servanda.judgement.breakdown import Advice
from servanda.judgement.verdict import BlindSpot
from servanda.rl.dumps.checks import unasked
from servanda.rl.follow.follow_step import FollowStep
from servanda.rl.monitor.drafts import draft_metrics, notes_on
from servanda.rl.monitor.part import drafts_of, extras_of, weighed_of
from servanda.rl.monitor.ranks import Part
from servanda.rl.monitor.state_file import RunState
from servanda.rl.monitor.step import metrics_of, of_cells, selection
from servanda.rl.steps.drift import TokenSum
from servanda.rl.steps.judge import NO_TOKEN, StepJudge, StepSums, StepVerdict
from servanda.rl.trend.step_scalars import scalars_of
from servanda.theory.stats.draft_counts import DraftCounts

BEFORE_AN_UPDATE = (
    "before the first update: kernels, prompts, logprob mode or another checkpoint, not the sync"
)


def blind_spots(judged: int, offered: int, left_out: Sequence[str]) -> list[BlindSpot]:
    """The sequences that were not scored, and the omitted slices."""
    share = [BlindSpot("sample", selection(judged, offered))] if offered > judged else []
    slices = (BlindSpot("slice", text) for text in left_out)
    return [
        *share,
        *slices,
        BlindSpot("data", f"a step has no whole texts: not examined {unasked()}"),
    ]


def cause_text(found: StepVerdict, advice: Advice | None, weights: int) -> str:
    """The likely cause of a violated step, or the problem of its data; "" if none.

    Args:
        weights: number of updates of the trainer.
    """
    if found.errors:
        return found.errors[0]
    cells = (c for c in found.quick.cells if c.enforced and c.outcome == "violated")
    early = not weights and any(c.section == "statistical" for c in cells)
    causes = ["" if advice is None else advice.cause, BEFORE_AN_UPDATE if early else ""]
    return "; ".join(filter(None, causes))


@dataclass(frozen=True)
class JudgedStep:
    """The verdict on the parts of all ranks, and what was found beside it.

    Args:
        drafts: what the engines of all ranks counted.
        metrics: of drafts, loss and versions.
        notes: about the data, and about steps that are judged together.
    """

    verdict: StepVerdict
    drafts: DraftCounts
    metrics: dict[str, float]
    notes: Sequence[str]


def judged(
    judge: StepJudge,
    state: RunState,
    parts: Sequence[Part],
    groups: Mapping[str, TokenSum],
    step: int,
    follow: FollowStep | None,
    look: Callable[[], Sequence[str]],
) -> JudgedStep:
    """Judge a step from the parts of all ranks.

    Args:
        step: its number in the trainer's log.
        look: finds out why the data of a red step is no evidence.
    """
    plan, weights = judge.plan, parts[0].weights
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
        notes.append(NO_TOKEN)
    thin = 0 < own.tokens < judge.enough and judge.size > 1
    if thin and not judge.number:
        notes.append(
            f"a step has about {own.tokens:,} tokens and about {judge.enough:,} decide: what a "
            f"step does not decide is judged on the last {judge.size:,} steps together"
        )
    found = judge.add(StepSums(step, own), [*wrong, *problems], look)
    found = found.beside(blind_spots(own.sequences, sum(p.offered for p in parts), state.left_out))
    if state.chart is not None:
        measured = metrics_of(parts, groups) | metrics | of_cells(found.quick)
        measured |= follow.metrics if follow is not None else {}
        values = {} if found.outcome == "error" else scalars_of(measured)
        found = found.compared(state.chart.add(weights, values))
    return JudgedStep(found, drafts, metrics, notes)
