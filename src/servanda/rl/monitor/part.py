# The part of this rank in a step: everything that a verdict needs of its tokens; and the parts of
# all ranks together.

from __future__ import annotations

from collections.abc import Sequence

from servanda.contract.model import Contract
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.clauses.loss_checks import LossSums
from servanda.judgement.evidence import Weighed
from servanda.judgement.plan import Plan
from servanda.rl.dumps.checks.coherence import IMPOSSIBLE, LIMIT_NATS
from servanda.rl.monitor import loss, soundness, versions
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.device_batch import agreement
from servanda.rl.monitor.ranks import Part
from servanda.rl.monitor.statistics import StepStatistics, contributions
from servanda.rl.steps.drift import StepDrift, TokenSum
from servanda.theory.stats.agreement import Agreement
from servanda.theory.stats.coherence import Coherence
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.theory.stats.lag_split import LagSplit


def part_of(
    member: str,
    digest: str,
    contract: Contract,
    statistics: StepStatistics,
    batch: Batch,
    drafts: DraftCounts,
) -> Part:
    """Reduce a batch to what is sent to the other ranks.

    Args:
        digest: of the contract, which takes long to compute.
    """
    own = statistics.of(batch)
    names = batch.group_B or tuple(f"{b}@{member}" for b in range(batch.sequences))
    sums = StepDrift(batch.weights)
    drifts = zip(own.drift_B.tolist(), own.known_B.tolist(), strict=True)
    for name, drift, selected in zip(names, drifts, batch.selected_B.tolist(), strict=True):
        if selected:
            sums.add_groups({name: TokenSum(*drift)})
    return Part(
        member,
        digest,
        batch.weights,
        statistics=own.statistics,
        groups=tuple(sums.groups.items()),
        sequences=batch.selected,
        offered=batch.offered,
        tokens=batch.tokens,
        usable=own.usable,
        staleness=batch.staleness,
        contributions=contributions(batch, psi_of(contract)),
        unsound=(*soundness.problems(batch), *loss.problems(batch)),
        agreement=agreement(batch),
        drafts=drafts,
        loss=own.loss,
        versions=versions.fits_of(batch),
        lags=versions.lag_split(batch),
        scalars=own.scalars,
        gross=own.gross,
    )


def drafts_of(parts: Sequence[Part]) -> DraftCounts:
    """What the engines of all ranks counted."""
    return sum((part.drafts for part in parts), DraftCounts())


def weighed_of(plan: Plan, parts: Sequence[Part], groups: int) -> Weighed:
    """The parts of all ranks as one closed round, the scope of a step's verdict."""
    drafts = drafts_of(parts)
    by_cell = zip(plan.cells, zip(*(part.statistics for part in parts), strict=True), strict=True)
    return Weighed(
        tuple(drafts if c.kind.reads == "drafts" else c.kind.join(own) for c, own in by_cell),
        ((),) * len(plan.cells),  # a step has no noise floor
        sequences=sum(part.sequences for part in parts),
        tokens=sum(part.tokens for part in parts),
        groups=groups,
        agreement=sum((part.agreement for part in parts), Agreement()),
    )


def extras_of(
    plan: Plan, parts: Sequence[Part], weights: int
) -> tuple[list[str], list[str], dict[str, float]]:
    """What the logprobs of all ranks say together, what the loss used, which versions sampled.

    Returns:
        The problems, the notes, and the metrics to log.
    """
    gross = sum((part.gross for part in parts), Coherence())
    # no mean of growths exceeds the largest, so that most steps need no mean
    likely = max(gross.growth, default=0.0) >= LIMIT_NATS
    problems = [IMPOSSIBLE] if likely and gross.log_e >= LIMIT_NATS else []
    notes: list[str] = []
    metrics: dict[str, float] = {}
    sums = [part.loss for part in parts if part.loss is not None]
    if sums:
        whole = LossSums.joined(sums)
        problems += filter(None, [loss.problem(whole, plan.contract)])
        notes += filter(None, [loss.note(whole, plan.contract)])
        metrics |= loss.metrics_of(whole, plan.contract)
    fits = versions.joined([part.versions for part in parts])
    if fits:
        wrong = versions.wrong(fits, weights, plan.alpha)
        problems += wrong.values()
        metrics["servanda/version/wrong_replicas"] = float(len(wrong))
    line = sum((part.lags for part in parts), LagSplit()).line
    if line is not None:
        metrics["servanda/lag/gap_nats"] = line.gap
        metrics["servanda/lag/per_update_nats"] = line.slope
        for name, at in (("low", 0), ("high", 1)):
            metrics[f"servanda/lag/per_update_nats/{name}"] = line.slope_interval[at]
    return problems, notes, metrics
