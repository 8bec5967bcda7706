# The plan: everything that is decided before the first token is drawn.
#
# Cells and their number (the price of a violation), prompts and their order, seeds, rounds,
# sizes and alpha.  Order and inclusion are decided before the outcome (law 5).

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from servanda.clauses import GUARDS, Cell, Certificate, Fact, Kind, Later, NotHere, feed_of
from servanda.contract import (
    WHOLE,
    Clause,
    Contract,
    Place,
    Relative,
    Section,
    SliceRule,
    Stage,
)
from servanda.corpus import Corpus
from servanda.divergence import DIVERGENCES
from servanda.errors import ContractError, Problem
from servanda.identity import digest_of
from servanda.registry import did_you_mean
from servanda.sampling import uniforms
from servanda.scope import slices_of
from servanda.slices import LABEL, Cut, cuts_of
from servanda.stats import units_at_best

# Preconditions that every statistical clause needs, added where a contract has none.
_DEFAULT_GUARDS = (
    Clause.model_validate({"id": "sampler_fidelity", "metric": "sampler_fidelity"}),
    Clause.model_validate({"id": "usable_ratio", "metric": "usable_ratio", "at_least": 0.999}),
)
NOISE_STRIDE = 10  # every tenth sequence or text is measured against itself


@dataclass(frozen=True)
class Unit:
    """One launched sequence: its index, its prompt's row, and its prompt group's draw."""

    sequence: int
    row: int
    group: int


@dataclass(frozen=True)
class Plan:
    """What will run, and how it will be judged."""

    contract: Contract
    corpus: Corpus | None
    golden: Corpus | None
    stage: Stage
    attempt: int
    cells: tuple[Cell, ...]

    @property
    def alpha(self) -> float:
        """What this attempt may spend of 1 - confidence; all attempts together spend it once."""
        return (1 - self.contract.confidence) / (self.attempt * (self.attempt + 1))

    @cached_property
    def price_cells(self) -> int:
        return sum(cell.priced for cell in self.cells)

    @property
    def first(self) -> int:
        return self.contract.promotion.offline.sequences[0]

    @property
    def last(self) -> int:
        return self.contract.promotion.offline.sequences[1]

    @property
    def width(self) -> int:
        return self.contract.workload.sampling.max_new_tokens if self.contract.workload else 0

    @cached_property
    def seed(self) -> int:
        """Noise is fresh in every attempt."""
        declared = self.contract.workload.sampling.seed if self.contract.workload else 0
        return int(digest_of(["run", declared, self.attempt])[:15], 16)

    @property
    def round_size(self) -> int:
        return self.contract.workload.round if self.contract.workload else 1

    @property
    def rounds(self) -> int:
        return math.ceil(self.last / self.round_size) if self.corpus else 0

    def units(self, index: int) -> Iterator[Unit]:
        """The sequences of a round, in launch order; every round is full, the last one too.

        Each draw takes a prompt group at random with replacement, so that the groups are
        independent draws from what the contract's claim speaks of.
        """
        assert self.corpus is not None and self.contract.workload is not None
        groups, samples = self.corpus.groups, self.contract.workload.samples
        stride = max(map(len, groups)) * samples
        start = index * self.round_size
        for draw in range(start, start + self.round_size):
            rows = groups[int(uniforms(self.seed, "prompt", draw, 1)[0] * len(groups))]
            for i, row in enumerate(r for r in rows for _ in range(samples)):
                yield Unit(draw * stride + i, row, draw)

    def noise_rows(self, n: int) -> list[int]:
        """Which of a round's n sequences are measured against themselves, in what order.

        Reversed and without their neighbours: another composition of the batch.  A round of
        one sequence has no other composition.
        """
        if n < 2:
            return []
        return list(range(0, n, NOISE_STRIDE))[::-1]

    def offered(self, cell: Cell) -> int:
        """Units that the whole run is expected to have in a cell, at most: tokens or groups."""
        if self.corpus is None:
            return 0
        groups, prompts = self.corpus.groups, self.corpus.prompts
        if cell.cut not in self._meeting:  # clauses share their slices
            self._meeting[cell.cut] = sum(
                any(cell.cut.may_meet(prompts[r]) for r in group) for group in groups
            )
        room = cell.capacity if cell.claim == "realised" else 1
        return self.last * self._meeting[cell.cut] // len(groups) * room

    @cached_property
    def _meeting(self) -> dict[Cut, int]:
        return {}

    @cached_property
    def digest(self) -> str:
        return digest_of(
            [
                self.contract.digest,
                self.corpus.digest if self.corpus else "",
                self.golden.digest if self.golden else "",
                self.stage,
                self.attempt,
                [cell.name for cell in self.cells],
            ]
        )


def make_plan(
    contract: Contract,
    corpus: Corpus | None,
    golden: Corpus | None,
    *,
    stage: Stage = "offline",
    attempt: int = 1,
) -> Plan:
    """Contract and corpora to a plan.

    Raises:
        ContractError: a slice no prompt can meet, or a limit that the sizes cannot certify.
    """
    plan, problems = draft(contract, corpus, golden, stage=stage, attempt=attempt)
    if problems:
        raise ContractError.all(problems)
    return plan


def draft(
    contract: Contract,
    corpus: Corpus | None,
    golden: Corpus | None,
    *,
    stage: Stage = "offline",
    attempt: int = 1,
) -> tuple[Plan, list[Problem]]:
    """A plan, and what stands against running it; cells that cannot be met are left out."""
    labelled = corpus or golden
    cuts = cuts_of(contract.slices, labelled) if labelled else {WHOLE: (Cut(WHOLE),)}
    samples = contract.workload.samples if contract.workload else 1
    width = contract.workload.sampling.max_new_tokens if contract.workload else 0
    capacities: dict[Cut, int] = {}
    cells: list[Cell] = []
    places: list[Place] = []
    problems: list[Problem] = []
    for i, rule in enumerate(contract.slices):
        if labelled is not None and not cuts[rule.name]:
            problems.append(_no_label(contract, i, rule, labelled))
    for section, place, clause in _clauses(contract, stage):
        kind = _kind(section, clause, stage, corpus is not None)
        for cut in _cuts_for(contract, section, clause, cuts):
            source = {"workload": corpus, "golden": golden, "none": None}[kind.source]
            if cut not in capacities:
                capacities[cut] = cut.capacity(corpus, samples, width) if corpus else 0
            capacity = capacities[cut]
            unmet = source is not None and not any(cut.may_meet(p) for p in source.prompts)
            if source is not None and (unmet or (source is corpus and not capacity)):
                problems.append(_empty(contract, place, cut, clause, source))
                continue
            cell = Cell(clause, section, cut, clause.claim or contract.claim, capacity, kind)
            cells.append(cell)
            places.append(place)
    plan = Plan(contract, corpus, golden, stage, attempt, tuple(cells))
    for cell, place in zip(cells, places, strict=True):
        problems += _out_of_reach(plan, cell, place)
    return plan, problems


def _clauses(contract: Contract, stage: Stage) -> Iterator[tuple[Section, Place, Clause]]:
    """The contract's clauses, and the guards that it does not enforce on the whole itself."""
    guarded = set()
    for section, place, clause in contract.clauses():
        yield section, place, clause
        if clause.enforced and stage in clause.stages and WHOLE in (clause.slices or (WHOLE,)):
            guarded.add(clause.metric)
    for guard in _DEFAULT_GUARDS:
        if contract.statistical and guard.metric not in guarded:
            yield "observability", ("observability",), guard


def _kind(section: Section, clause: Clause, stage: Stage, has_workload: bool) -> Kind:
    if stage not in clause.stages:
        return NotHere(f"stages: {', '.join(clause.stages)}; this is {stage}")
    if clause.metric in GUARDS:
        return GUARDS[clause.metric]() if has_workload else NotHere("there is no workload")
    if isinstance(clause.at_most, Relative):
        return Later(f"this version cannot judge a limit relative to {clause.at_most.of!r}")
    if section == "numerical" and clause.metric in DIVERGENCES:
        return Fact()
    feed = feed_of(clause) if section == "statistical" else None
    if feed is not None:
        return Certificate(feed)
    what = clause.metric if clause.metric not in DIVERGENCES else f"{clause.metric} without clip"
    return Later(f"this version cannot judge {what!r}")


def _cuts_for(
    contract: Contract, section: Section, clause: Clause, cuts: dict[str, tuple[Cut, ...]]
) -> list[Cut]:
    names = slices_of(contract, section, clause)
    return [cut for name in dict.fromkeys(names) for cut in cuts[name]]


def _no_label(contract: Contract, i: int, rule: SliceRule, corpus: Corpus) -> Problem:
    label = (rule.split or "")[len(LABEL) :]
    known = {name for prompt in corpus.prompts for name in prompt.labels}
    return Problem(
        f"slice {rule.name!r} splits by label {label!r}, which no line of {corpus.file} has",
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


def _out_of_reach(plan: Plan, cell: Cell, place: Place) -> Iterator[Problem]:
    """A limit that even identical kernels could not be shown to keep at these sizes."""
    if not isinstance(cell.kind, Certificate) or not cell.clause.enforced or plan.corpus is None:
        return
    most = plan.offered(cell)
    needed = units_at_best(cell.kind.feed.limit, plan.alpha)
    if needed is not None and needed <= most:
        return
    unit = "tokens" if cell.claim == "realised" else "prompt groups"
    asked = "no number of" if needed is None else f"at least {needed:,}"
    yield Problem(
        f"clause {cell.clause.id!r} cannot hold on slice {cell.cut.name!r}: even identical "
        f"kernels would need {asked} {unit}, and the run is expected to have {most:,} there",
        plan.contract.where(*place, "at_most"),
        "raise `at_most`, or the second number of promotion.offline.sequences",
    )
