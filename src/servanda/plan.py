# The plan: everything that is decided before the first token is drawn.
#
# Cells and their number (the price of a violation), schedules, sizes and alpha.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from servanda.answers import unanswered
from servanda.clauses import (
    CALIBRATION,
    CHAIN,
    DRAWS,
    GUARDS,
    TIMINGS,
    BatchInvariance,
    BoundedFact,
    BySequence,
    Calibration,
    Cell,
    Certificate,
    CornerFact,
    Fact,
    Kind,
    Later,
    LoadOf,
    NotHere,
    RelativeCertificate,
    RewardGap,
    ServiceLevel,
    certificate_of,
    chain_metric,
    corners_of,
    service_level,
)
from servanda.contract import BEST_ONLY, WHOLE, Clause, Contract, Kernel, Place, Section, Stage
from servanda.corpus import Corpus
from servanda.divergence import DIVERGENCES
from servanda.errors import ContractError, Problem
from servanda.identity import digest_of
from servanda.registry import did_you_mean
from servanda.rewards import file_and_function
from servanda.schedule import Schedule
from servanda.scope import slices_of
from servanda.slices import LABEL, Cut, cuts_of
from servanda.stats import attempt_alpha, units_at_best

# Preconditions that every statistical clause needs, added where a contract has none.
DEFAULT_GUARDS = (
    Clause.model_validate({"id": "sampler_fidelity", "metric": "sampler_fidelity"}),
    Clause.model_validate({"id": "usable_ratio", "metric": "usable_ratio", "at_least": 0.999}),
)
# who asks train what was served needs no word of infer
_INSTEAD = {"sampler_fidelity": "served_fidelity"}


@dataclass(frozen=True)
class Plan:
    """What will run, and how it will be judged."""

    contract: Contract
    corpora: Mapping[str, Corpus]  # of each workload
    golden: Corpus | None
    stage: Stage
    attempt: int
    cells: tuple[Cell, ...]
    reward_source: str = ""  # of the file that holds the contract's own reward

    @property
    def alpha(self) -> float:
        """What this attempt may spend of 1 - confidence; all attempts together spend it once."""
        return attempt_alpha(1 - self.contract.confidence, self.attempt)

    @cached_property
    def price_cells(self) -> int:
        return sum(cell.priced for cell in self.cells)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """One for each workload; the first is that of clauses which name none."""
        return _schedules(self.contract, self.corpora, self.attempt)

    @cached_property
    def stable(self) -> Kernel | None:
        """The stable kernel, where a clause is judged against it."""
        compared = any("stable" in cell.kind.peers for cell in self.cells)
        return self.contract.stable if compared else None

    def offered(self, cell: Cell) -> int:
        """Units that the whole run is expected to have in a cell, at most: tokens or groups."""
        for schedule in self.schedules:
            if schedule.name == cell.workload:
                room = cell.capacity if cell.claim == "realised" else 1
                return schedule.meeting(cell.cut) * room
        return 0

    @cached_property
    def stable_rounds(self) -> bool:
        """Whether the stable kernel draws beside infer, and is not only timed."""
        return any(cell.workload and "stable" in cell.kind.peers for cell in self.cells)

    def scored(self, workload: str) -> tuple[Cut, ...]:
        """Slices of a workload on which train draws as well, and answers have a reward."""
        cuts = [c.cut for c in self.cells if c.workload == workload and DRAWS in c.kind.peers]
        return tuple(dict.fromkeys(cuts))

    @cached_property
    def reward(self) -> str:
        """Digest of what gives answers their reward; "" where no clause asks for it."""
        reward = self.contract.reward
        if reward is None or reward.of is None or not any(map(self.scored, self.corpora)):
            return ""
        _, function = file_and_function(reward.of) or ("", reward.of)
        return digest_of([function, self.reward_source])

    @cached_property
    def loads(self) -> Mapping[LoadOf, bool]:
        """Every load under which requests are timed, and whether on stable as well."""
        loads: dict[LoadOf, bool] = {}
        for cell in self.cells:
            if isinstance(cell.kind, ServiceLevel):
                beside = "stable" in cell.kind.peers
                loads[cell.kind.load] = loads.get(cell.kind.load, False) or beside
        return loads

    @cached_property
    def digest(self) -> str:
        return digest_of(
            [
                self.contract.digest,
                {name: corpus.digest for name, corpus in self.corpora.items()},
                self.golden.digest if self.golden else "",
                self.stage,
                self.attempt,
                [cell.name for cell in self.cells],
                *([self.reward] if self.reward else []),
            ]
        )


def _schedules(
    contract: Contract, corpora: Mapping[str, Corpus], attempt: int
) -> tuple[Schedule, ...]:
    first, last = contract.promotion.offline.sequences
    schedules = []
    for name, workload in contract.all_workloads.items():
        # each workload has noise of its own, and it is fresh in every attempt
        own = [] if name == "workload" else [name]
        seed = int(digest_of(["run", *own, workload.sampling.seed, attempt])[:15], 16)
        schedules.append(Schedule(name, workload, corpora[name], seed, first, last))
    return tuple(schedules)


def make_plan(
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    stage: Stage = "offline",
    attempt: int = 1,
    reward_source: str = "",
) -> Plan:
    """Contract and corpora to a plan.

    Raises:
        ContractError: a slice no prompt can meet, a limit that the sizes cannot certify, or
            lines that lack what the reward reads.
    """
    plan, problems = draft(contract, corpora, golden, stage=stage, attempt=attempt)
    if problems:
        raise ContractError.all(problems)
    return replace(plan, reward_source=reward_source)


def draft(
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    stage: Stage = "offline",
    attempt: int = 1,
) -> tuple[Plan, list[Problem]]:
    """A plan, and what stands against running it; cells that cannot be met are left out."""
    schedules = {s.name: s for s in _schedules(contract, corpora, attempt)}
    labelled = {name: s.corpus for name, s in schedules.items()} or ({"": golden} if golden else {})
    # golden texts alone have slices of their own, and no texts at all have the whole
    cuts = {name: cuts_of(contract.slices, s.corpus) for name, s in schedules.items()}
    cuts[""] = cuts_of(contract.slices, golden) if golden else {WHOLE: (Cut(WHOLE),)}
    problems = [
        _no_label(contract, i, rule.name, rule.split or "", next(iter(labelled.values())))
        for i, rule in enumerate(contract.slices)
        if labelled and not any(cuts[name][rule.name] for name in labelled)
    ]
    cells: list[Cell] = []
    for section, place, clause in _clauses(contract, stage, [*schedules]):
        schedule = schedules.get(contract.workload_of(clause))
        kind = _kind(contract, section, clause, stage, schedule)
        claim = clause.claim or contract.claim
        for cut in _cuts_for(contract, section, clause, cuts[schedule.name if schedule else ""]):
            on_golden = kind.source == "golden"
            corpus = golden if on_golden else schedule.corpus if schedule else None
            capacity = schedule.capacity(cut) if schedule else 0
            if schedule and isinstance(kind, BySequence):
                capacity = schedule.sequences(cut)
            met = cut.met_by(corpus) if on_golden and corpus else capacity
            if kind.source in ("golden", "workload") and corpus and not met:
                problems.append(_empty(contract, place, cut, clause, corpus))
                continue
            name = schedule.name if schedule and kind.source == "workload" else ""
            cells.append(Cell(clause, section, place, cut, claim, capacity, kind, name))
        for corner in corners_of(contract) if isinstance(kind, Fact) else ():
            cut = Cut(corner.name)
            cells.append(Cell(clause, section, place, cut, claim, 0, CornerFact(corner)))
    plan = Plan(contract, corpora, golden, stage, attempt, tuple(cells))
    for cell in cells:
        problems += out_of_reach(plan, cell)
    return plan, [*problems, *unanswered(plan.contract, cells, plan.corpora, cuts)]


def _clauses(
    contract: Contract, stage: Stage, workloads: list[str]
) -> Iterator[tuple[Section, Place, Clause]]:
    """The contract's clauses, and the guards that it does not enforce on the whole itself."""
    guarded, certified = set(), set()
    for section, place, clause in contract.clauses():
        yield section, place, clause
        workload = contract.workload_of(clause)
        if section == "statistical":
            certified.add(workload)
        if clause.enforced and stage in clause.stages and WHOLE in (clause.slices or (WHOLE,)):
            guarded.add((clause.metric, workload))
    for workload in workloads:
        for guard in _guards_of(contract, workload):
            found = {guard.metric, _INSTEAD.get(guard.metric)}
            if workload in certified and not any((m, workload) in guarded for m in found):
                name = guard.id if workload == workloads[0] else f"{guard.id}.{workload}"
                changes = {"id": name, "workload": workload}
                yield "observability", ("observability",), guard.model_copy(update=changes)


def _guards_of(contract: Contract, workload: str) -> Iterator[Clause]:
    """A trainer's record has no ranks, so what its tokens were drawn from cannot be tested."""
    drawn = contract.all_workloads[workload].source == "trainer"
    yield from (g for g in DEFAULT_GUARDS if not (drawn and g.metric == "sampler_fidelity"))


def _of_best(clause: Clause) -> Kind:
    """A numerical clause where infer tells its best tokens: between the ends that they leave."""
    metric = DIVERGENCES.get(clause.metric)
    if metric is not None and "topk" in metric.forms:
        return BoundedFact()
    reason = "infer tells the best tokens of golden texts, which do not bound this metric"
    return NotHere(reason, required=bool(clause.required))


def _kind(
    contract: Contract,
    section: Section,
    clause: Clause,
    stage: Stage,
    schedule: Schedule | None,
) -> Kind:
    if stage not in clause.stages:
        return NotHere(f"stages: {', '.join(clause.stages)}; this is {stage}")
    if clause.metric in GUARDS:
        return GUARDS[clause.metric]() if schedule else NotHere("there is no workload")
    if clause.metric in TIMINGS:
        if schedule is None:
            return NotHere("there is no workload whose prompts could be timed")
        load = LoadOf.of(clause, schedule.name, schedule.width)
        return service_level(clause, load, schedule.seed)
    if clause.metric == "batch_invariance_nats":
        return BatchInvariance()
    if section == "numerical" and contract.kernels.infer.engine in BEST_ONLY:
        return _of_best(clause)
    if section == "numerical" and clause.metric == CALIBRATION:
        return Calibration()
    if clause.metric in CHAIN:
        return chain_metric(contract, clause).of(contract, clause)
    if clause.metric in DIVERGENCES:
        if section == "numerical":
            return Fact()
        kind = certificate_of(clause)
        if kind is not None:
            return kind
    return Later(f"this version cannot judge {clause.metric!r}")


def _cuts_for(
    contract: Contract, section: Section, clause: Clause, cuts: dict[str, tuple[Cut, ...]]
) -> list[Cut]:
    names = slices_of(contract, section, clause)
    return [cut for name in dict.fromkeys(names) for cut in cuts[name]]


def _no_label(contract: Contract, i: int, name: str, split: str, corpus: Corpus) -> Problem:
    label = split.removeprefix(LABEL)
    known = {name for prompt in corpus.prompts for name in prompt.labels}
    return Problem(
        f"slice {name!r} splits by label {label!r}, which no line of {corpus.file} has",
        contract.where("slices", i, "split"),
        did_you_mean(label, known) if known else 'lines may have "labels": {"name": "value"}',
    )


def _empty(contract: Contract, place: Place, cut: Cut, clause: Clause, source: Corpus) -> Problem:
    return Problem(
        f"slice {cut.name!r} of clause {clause.id!r} is empty: no line of {source.file} can "
        "meet it",
        contract.where(*place, "slices"),
        f"add such prompts, or give {clause.id!r} other `slices:`, such as [all]",
    )


def out_of_reach(plan: Plan, cell: Cell) -> Iterator[Problem]:
    """A limit that even identical kernels could not be shown to keep at these sizes."""
    kind = cell.kind
    if not isinstance(kind, Certificate | RewardGap) or isinstance(kind, RelativeCertificate):
        return
    if not cell.clause.enforced:
        return
    most = plan.offered(cell)
    if isinstance(kind, RewardGap):
        needed = kind.units_at_best(plan.alpha)
    else:
        needed = units_at_best(kind.feed.limit, plan.alpha, kind.feed.best)
    if needed is not None and needed <= most:
        return
    unit = f"{kind.each}s" if cell.claim == "realised" else "prompt groups"
    asked = "no number of" if needed is None else f"at least {needed:,}"
    yield Problem(
        f"clause {cell.clause.id!r} cannot hold on slice {cell.cut.name!r}: even identical "
        f"kernels would need {asked} {unit}, and the run is expected to have {most:,} there",
        plan.contract.where(*cell.place, "at_most"),
        "raise `at_most`, or the second number of promotion.offline.sequences",
    )
