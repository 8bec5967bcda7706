# Kinds: the clauses of a stage, and how each is judged there.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from servanda.contract.clause import WHOLE, Clause, Place, Relative, Section, Stage
from servanda.contract.model import BEST_ONLY, EXTERNAL, PACK, Contract
from servanda.contract.speculation import OPTION as SPECULATION
from servanda.judgement.clauses.base import (
    GUARDS,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Source,
    blank,
)
from servanda.judgement.clauses.batch_invariance import BatchInvariance
from servanda.judgement.clauses.chain_metrics import CHAIN, chain_metric
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE, ServedDrafts
from servanda.judgement.clauses.format_cost import (
    FormatCertificate,
    FormatKernel,
    format_kernel,
)
from servanda.judgement.clauses.numerical import BoundedFact, Calibration, Fact
from servanda.judgement.clauses.sample_ratio import STAGES_WITH_SPLIT
from servanda.judgement.clauses.service_level import TIMINGS, LoadOf, service_level
from servanda.judgement.clauses.statistical import (
    Certificate,
    MassGap,
    RelativeToNoise,
    RelativeToStable,
    feed_of,
)
from servanda.judgement.schedule import Schedule
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.calibration import CALIBRATION

# Validity checks that every statistical clause needs, added if a contract has none.
DEFAULT_GUARDS = (
    Clause.model_construct(id="sampler_fidelity", metric="sampler_fidelity"),
    Clause.model_construct(id="usable_ratio", metric="usable_ratio", at_least=0.999),
)
# scoring served tokens by train needs no infer engine
_INSTEAD = {"sampler_fidelity": "served_fidelity"}


@dataclass(frozen=True)
class NotHere(Kind):
    """A kind that does not apply at this stage or on these engines: shown, not counted.

    If the clause is `required`, its absence is an error.
    """

    reason: str
    required: bool = False
    source: ClassVar[Source] = "none"
    applies: ClassVar[bool] = False

    def judge(self, cell: Cell, rounds: list[Any], floor: object, look: Interim) -> CellVerdict:
        return blank(cell, "error" if self.required else "not applicable", self.reason)


class Later(NotHere):
    """A kind that this version knows only by name: inconclusive, never a pass."""

    applies: ClassVar[bool] = True

    def judge(self, cell: Cell, rounds: list[Any], floor: object, look: Interim) -> CellVerdict:
        return blank(cell, "inconclusive", self.reason)


def clauses_at(
    contract: Contract, stage: Stage, workloads: Sequence[str]
) -> Iterator[tuple[Section, Place, Clause]]:
    """The contract's clauses, plus default validity checks that it lacks on the whole."""
    guarded, certified = set(), set()
    for section, place, clause in contract.clauses():
        yield section, place, clause
        workload = contract.workload_of(clause)
        if section == "statistical":
            certified.add(workload)
        if clause.enforced and stage in clause.stages and WHOLE in (clause.slices or (WHOLE,)):
            guarded.add((clause.metric, workload))
    for workload in workloads:
        drawn = contract.all_workloads[workload].source == "trainer"
        for guard in DEFAULT_GUARDS:
            if drawn and guard.metric == "sampler_fidelity":
                continue  # a trainer's record has no ranks to test its sampler
            metrics = {guard.metric, _INSTEAD.get(guard.metric)}
            if workload in certified and not any((m, workload) in guarded for m in metrics):
                name = guard.id if workload == workloads[0] else f"{guard.id}.{workload}"
                changes = {"id": name, "workload": workload}
                yield "observability", ("observability",), guard.model_copy(update=changes)


def kind_of(
    contract: Contract,
    section: Section,
    clause: Clause,
    stage: Stage,
    schedule: Schedule | None,
    *,
    live: bool = False,
) -> Kind:
    """The kind of a clause at a stage.

    Args:
        schedule: schedule of its workload, if any.
        live: whether the tokens come from traffic.
    """
    if stage not in clause.stages:
        return NotHere(f"stages: {', '.join(clause.stages)}; this is {stage}")
    kind = _kind(contract, section, clause, schedule)
    reason = _not_live(contract, clause, kind, stage) if live else kind.live_only
    return NotHere(reason) if reason else kind


def _not_live(contract: Contract, clause: Clause, kind: Kind, stage: Stage) -> str:
    """The reason why a clause cannot be judged on traffic; "" if it can."""
    traffic = next(iter(contract.all_workloads), "")
    if contract.workload_of(clause) != traffic:
        return f"traffic is one workload, {traffic!r}, and the clause is of another"
    if kind.source == "split" and stage not in STAGES_WITH_SPLIT:
        return "infer serves no user in shadow, so there is no split"
    return kind.offline_only


def _kind(contract: Contract, section: Section, clause: Clause, schedule: Schedule | None) -> Kind:
    if clause.metric in GUARDS:
        known = GUARDS[clause.metric]
        return known.declared(contract) if schedule else NotHere("there is no workload")
    if clause.metric in TIMINGS:
        if schedule is None:
            return NotHere("there is no workload whose prompts could be timed")
        load = LoadOf.of(clause, schedule.name, schedule.width)
        return service_level(clause, load, schedule.seed)
    if clause.metric == "batch_invariance_nats":
        return BatchInvariance()
    if clause.metric == DRAFT_ACCEPTANCE:
        return _of_drafts(contract, clause, schedule)
    if section == "numerical" and contract.kernels.infer.engine in BEST_ONLY:
        # between the bounds from the top-k tokens
        metric = DIVERGENCES.get(clause.metric)
        if metric is not None and "topk" in metric.forms:
            return BoundedFact()
        reason = "infer tells the best tokens of golden texts, which do not bound this metric"
        return NotHere(reason, required=bool(clause.required))
    if section == "numerical" and clause.metric == CALIBRATION:
        return Calibration()
    if clause.metric in CHAIN:
        return chain_metric(contract, clause).of(contract, clause)
    if clause.metric in DIVERGENCES:
        if section == "numerical":
            return Fact()
        kind = _certificate_of(contract, clause)
        if kind is not None:
            return kind
    return Later(f"this version cannot judge {clause.metric!r}")


def _of_drafts(contract: Contract, clause: Clause, schedule: Schedule | None) -> Kind:
    infer = contract.kernels.infer
    vllm = infer.engine == "vllm" and SPECULATION in (infer.options or {})
    if infer.engine == "openai_http" or vllm:
        if schedule is not None:
            return ServedDrafts()
        return NotHere("there is no workload that drafts are made for", bool(clause.required))
    reason = "only a server, or engine vllm with options.speculative_config, counts drafts here"
    if infer.engine in (EXTERNAL, PACK, "recorded"):
        reason = "drafts are counted in a training run: Monitor.observe(..., drafts=)"
    return NotHere(reason, required=bool(clause.required))


def _certificate_of(contract: Contract, clause: Clause) -> Certificate | MassGap | None:
    """The certificate of a statistical clause; None if it has none."""
    if clause.metric == "mass_gap":
        return MassGap(clause.at_most) if isinstance(clause.at_most, float) else None
    feed = feed_of(clause)
    if feed is None:
        return None
    if isinstance(clause.at_most, Relative):
        relative = {"self_noise": RelativeToNoise, "stable": RelativeToStable}[clause.at_most.of]
        return relative(feed, times=clause.at_most.times)
    if clause.times_format is not None:
        other = format_kernel(contract.kernels.train, contract.kernels.infer)
        if isinstance(other, FormatKernel):
            return FormatCertificate(feed, clause.times_format, other.format, other.whole)
    return Certificate(feed)
