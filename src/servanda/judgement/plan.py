# The plan: everything that is decided before the first token is sampled.
#
# Cells and their number (which sets the threshold of a violation), schedules, sizes and alpha.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from servanda.contract.clause import WHOLE, Clause, Place, Stage
from servanda.contract.identity import digest_of
from servanda.contract.model import Contract, Kernel
from servanda.contract.stages import Leg
from servanda.errors import ContractError, Problem
from servanda.judgement.clause_kinds import clauses_at, kind_of
from servanda.judgement.clauses.base import DRAWS, FORMAT, Cell
from servanda.judgement.clauses.format_cost import FormatKernel, format_kernel
from servanda.judgement.clauses.numerical import Corner, CornerFact, corners_of
from servanda.judgement.clauses.scope import slices_of
from servanda.judgement.clauses.service_level import LoadOf
from servanda.judgement.rewards import file_and_function, unanswered
from servanda.judgement.schedule import Arrivals, Schedule
from servanda.judgement.slices.rules import LABEL, Cut, cuts_of
from servanda.judgement.traffic import Traffic
from servanda.registry import did_you_mean
from servanda.theory.stats.alpha import attempt_alpha
from servanda.traces.corpus import Corpus


@dataclass(frozen=True)
class Plan:
    """The plan of a run: its samples and its judgement.

    Args:
        leg: step of a promotion; None for a single check.
        traffic: requests of a live step.
        reward_source: source text of the contract's own reward.
    """

    contract: Contract
    corpora: Mapping[str, Corpus]  # per workload
    golden: Corpus | None
    stage: Stage
    attempt: int
    cells: tuple[Cell, ...]
    reward_source: str = ""
    leg: Leg | None = None
    traffic: Traffic | None = None

    @property
    def alpha(self) -> float:
        """The error probability of this attempt; all attempts share 1 - confidence."""
        return attempt_alpha(1 - self.contract.confidence, self.attempt)

    @property
    def part(self) -> float:
        """The share of alpha for violations here: the steps of a promotion share it."""
        return self.leg.part if self.leg else 1.0

    @property
    def live(self) -> bool:
        """Whether the tokens come from traffic, so that no sampling runs offline."""
        return self.leg is not None and self.leg.live

    @property
    def texts(self) -> str:
        """Digest of all prompts and golden texts; the same at every stage."""
        corpora = [corpus.digest for corpus in self.corpora.values()]
        return digest_of([*corpora, self.golden.digest if self.golden else ""])

    @cached_property
    def price_cells(self) -> int:
        return sum(cell.priced for cell in self.cells)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of the workloads; clauses without a workload use the first.

        On a live step only the first: that of the traffic.
        """
        planned = _schedules(self.contract, self.corpora, self.attempt, self.leg)
        if self.leg is None or not self.leg.live:
            return planned
        traffic = self.traffic or Traffic("", self.leg.name)
        endless = self.leg.if_inconclusive == "wait"
        return tuple(
            # separate random numbers: the offline ones were used for other sequences
            Arrivals.of(traffic, s, _seed(s.seed, self.leg.name), endless=endless)
            for s in planned[:1]
        )

    @cached_property
    def stable(self) -> Kernel | None:
        """The stable kernel, if a clause is relative to it."""
        compared = any("stable" in cell.kind.peers for cell in self.cells)
        return self.contract.stable if compared else None

    @cached_property
    def format(self) -> Kernel | None:
        """The kernel that shows what the number format costs, if a clause allows it."""
        kernels = self.contract.kernels
        asked = any(FORMAT in cell.kind.peers for cell in self.cells)
        other = format_kernel(kernels.train, kernels.infer) if asked and not self.live else None
        return other.kernel if isinstance(other, FormatKernel) else None

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernels that are open at once, by side; train and infer come first."""
        named = dict(self.contract.kernels) | {"stable": self.stable, FORMAT: self.format}
        return {side: kernel for side, kernel in named.items() if kernel is not None}

    def offered(self, cell: Cell) -> int:
        """Largest expected number of units of a cell over the whole run: tokens or groups."""
        for schedule in self.schedules:
            if schedule.name == cell.workload:
                room = cell.capacity if cell.claim == "realised" else 1
                return schedule.meeting(cell.cut) * room
        return 0

    @cached_property
    def stable_rounds(self) -> bool:
        """Whether the stable kernel samples too, and is not only timed."""
        return any(cell.workload and "stable" in cell.kind.peers for cell in self.cells)

    def scored(self, workload: str) -> tuple[Cut, ...]:
        """Slices of a workload on which train samples too, and responses have a reward."""
        cuts = [c.cut for c in self.cells if c.workload == workload and DRAWS in c.kind.peers]
        return tuple(dict.fromkeys(cuts))

    @cached_property
    def reward(self) -> str:
        """Digest of the reward function; "" if no clause uses it."""
        reward = self.contract.reward
        if reward is None or reward.of is None or not any(map(self.scored, self.corpora)):
            return ""
        _, function = file_and_function(reward.of) or ("", reward.of)
        return digest_of([function, self.reward_source])

    @cached_property
    def loads(self) -> Mapping[LoadOf, bool]:
        """Every load under which requests are timed, and whether also on stable."""
        loads: dict[LoadOf, bool] = {}
        for cell in self.cells:
            if cell.kind.load is not None:
                beside = "stable" in cell.kind.peers
                loads[cell.kind.load] = loads.get(cell.kind.load, False) or beside
        return loads

    @cached_property
    def corners(self) -> tuple[Corner, ...]:
        """The corners of the envelope that are measured."""
        corners = dict.fromkeys(cell.kind.corner for cell in self.cells)
        return tuple(corner for corner in corners if corner is not None)

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
                *([[self.leg.name, self.leg.part]] if self.leg else []),
            ]
        )


def _schedules(
    contract: Contract, corpora: Mapping[str, Corpus], attempt: int, leg: Leg | None
) -> tuple[Schedule, ...]:
    first, last = (leg.first, leg.last) if leg else contract.promotion.offline.sequences
    schedules = []
    for name, workload in contract.all_workloads.items():
        # each workload has separate random numbers, new in every attempt
        own = [] if name == "workload" else [name]
        seed = _seed("run", *own, workload.sampling.seed, attempt)
        schedules.append(Schedule(name, workload, corpora[name], seed, first, last))
    return tuple(schedules)


def _seed(*of: str | int) -> int:
    return int(digest_of(list(of))[:15], 16)


def make_plan(
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    stage: Stage = "offline",
    attempt: int = 1,
    reward_source: str = "",
    leg: Leg | None = None,
    traffic: Traffic | None = None,
) -> Plan:
    """Compile a contract and corpora to a plan.

    Args:
        leg: step of a promotion, which defines stage and sizes.
        traffic: requests sent to infer on a live step; None: none yet.

    Raises:
        ContractError: a slice no prompt can meet, a limit that the sizes cannot certify, or
            lines that lack a key that the reward needs.
    """
    plan, problems = draft(contract, corpora, golden, stage=stage, attempt=attempt, leg=leg)
    if problems:
        raise ContractError.all(problems)
    return replace(plan, reward_source=reward_source, traffic=traffic)


def draft(
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    stage: Stage = "offline",
    attempt: int = 1,
    leg: Leg | None = None,
) -> tuple[Plan, list[Problem]]:
    """A plan and its problems; cells that no prompt can meet are left out."""
    stage, live = (leg.stage, leg.live) if leg else (stage, False)
    schedules = {s.name: s for s in _schedules(contract, corpora, attempt, leg)}
    labelled = {name: s.corpus for name, s in schedules.items()} or ({"": golden} if golden else {})
    # golden texts have their own slices; without texts there is only the whole
    cuts = {name: cuts_of(contract.slices, s.corpus) for name, s in schedules.items()}
    cuts[""] = cuts_of(contract.slices, golden) if golden else {WHOLE: (Cut(WHOLE),)}
    problems = [
        _no_label(contract, i, rule.name, rule.split or "", next(iter(labelled.values())))
        for i, rule in enumerate(contract.slices)
        if labelled and not any(cuts[name][rule.name] for name in labelled)
    ]
    cells: list[Cell] = []
    guarded = [*schedules][:1] if live else [*schedules]
    for section, place, clause in clauses_at(contract, stage, guarded):
        schedule = schedules.get(contract.workload_of(clause))
        kind = kind_of(contract, section, clause, stage, schedule, live=live)
        claim = clause.claim or contract.claim
        own = cuts[schedule.name if schedule else ""]
        names = dict.fromkeys(slices_of(contract, section, clause))
        for cut in (cut for name in names for cut in own[name]):
            on_golden = kind.source == "golden"
            corpus = golden if on_golden else schedule.corpus if schedule else None
            capacity = schedule.capacity(cut) if schedule else 0
            if schedule and kind.each == "sequence":
                capacity = schedule.sequences(cut)
            reach = cut.met_by(corpus) if on_golden and corpus else capacity
            if kind.source in ("golden", "workload") and corpus and not reach:
                problems.append(_empty(contract, place, cut, clause, corpus))
                continue
            name = schedule.name if schedule and kind.source == "workload" else ""
            cells.append(Cell(clause, section, place, cut, claim, capacity, kind, name))
        for corner in corners_of(contract) if kind.exact else ():
            cut = Cut(corner.name)
            cells.append(Cell(clause, section, place, cut, claim, 0, CornerFact(corner)))
    plan = Plan(contract, corpora, golden, stage, attempt, tuple(cells), leg=leg)
    problems += unpromised(plan)
    for cell in cells:
        problems += _out_of_reach(plan, cell)
    return plan, [*problems, *unanswered(plan.contract, cells, plan.corpora, cuts)]


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


def unpromised(plan: Plan) -> Iterator[Problem]:
    """Refuse a step of a promotion on which no clause could ever hold."""
    promises = [c for c in plan.cells if c.section != "observability" and c.clause.enforced]
    reasons = {c.clause.id: c.kind.reason for c in promises}
    if plan.leg is None or not all(c.kind.reason for c in promises):
        return
    text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    yield Problem(
        f"no enforced promise can be judged at {plan.stage}, so nothing could ever hold there: "
        f"{text or 'there is none'}",
        plan.contract.where("promotion", plan.stage),
        f"add a statistical clause that is enforced at {plan.stage}, or remove "
        f"promotion.{plan.stage}",
    )


def _out_of_reach(plan: Plan, cell: Cell) -> Iterator[Problem]:
    """Refuse a limit that even identical kernels could not be shown to keep at these sizes."""
    if not cell.clause.enforced:
        return
    needed, most = cell.kind.units_at_best(plan.alpha), plan.offered(cell)
    endless = plan.live and plan.leg is not None and plan.leg.if_inconclusive == "wait"
    if needed is not None and (endless or needed <= most):
        return
    unit = cell.units_of(cell.kind.each)
    needs = "no number of" if needed is None else f"at least {needed:,}"
    yield Problem(
        f"clause {cell.clause.id!r} cannot hold on slice {cell.cut.name!r}: even identical "
        f"kernels would need {needs} {unit}, and the run is expected to have {most:,} there",
        plan.contract.where(*cell.place, "at_most"),
        f"raise `at_most`, or the second number of promotion.{plan.stage}.prompt_groups",
    )
