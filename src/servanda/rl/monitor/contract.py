# The contract of a run, and the clauses that a step can judge.
#
# A contract is completed like that of a dump: both kernels run in a trainer, its claim is realised,
# and without slices it gets those for which the first step has enough tokens.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from servanda.contract.clause import SliceRule
from servanda.contract.model import EXTERNAL, Contract, Kernel
from servanda.contract.presets import PRESETS
from servanda.errors import ContractError
from servanda.judgement import plan as planning
from servanda.judgement.clause_kinds import NotHere
from servanda.judgement.clauses.base import Cell, Kind
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE, DraftAcceptance
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import LABEL
from servanda.rl.monitor.batch_fields import COLUMNS
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.contract import SLICED, WORKLOAD, Counts, Labels, corpus_of
from servanda.rl.trend.run_chart import with_reference
from servanda.runner.load import load


@dataclass(frozen=True)
class RunContract:
    """The user's contract before the first step.

    Args:
        preset: its name; "" for a user's contract.
        contract: the contract without automatic slices.
    """

    preset: str
    contract: Contract

    @classmethod
    def of(
        cls,
        given: str | Path | Contract,
        *,
        bitwise: bool = False,
        reference: str | Path | None = None,
    ) -> RunContract:
        """From a contract, the path of one, or the name of a trainer preset.

        Args:
            bitwise: whether both kernels are declared to compute the same bits.
            reference: of good runs, for the contract's trend.

        Raises:
            ContractError: no such preset or file, or an invalid contract.
        """
        own = cls._of(given, bitwise)
        return replace(own, contract=with_reference(own.contract, reference))

    @classmethod
    def _of(cls, given: str | Path | Contract, bitwise: bool) -> RunContract:
        if isinstance(given, str | Path):
            name = str(given)
            if name in PRESETS or (Path(name).name == name and not Path(name).suffix):
                preset = of_run.preset_of(name)
                return cls(preset, of_run.contract_of(preset, preset, (), bitwise=bitwise)[1])
            given = load(given)
        if not isinstance(given, Contract):
            raise ContractError(
                f"the contract of a monitor is a {type(given).__name__}",
                hint="pass a Contract, the path of one, or a preset's name, such as 'verl-sync'",
            )
        contract = _in_a_trainer(given)
        return cls("", contract.model_copy(update={"bitwise": True}) if bitwise else contract)

    @property
    def slices_itself(self) -> bool:
        """Whether the monitor chooses the slices."""
        return bool(self.preset) or not self.contract.slices

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of sequences that slices may use."""
        if self.slices_itself:
            return SLICED
        fields = {f for rule in self.contract.slices for f in (*(rule.match or {}), rule.split)}
        return tuple(sorted(f.removeprefix(LABEL) for f in fields if f and f.startswith(LABEL)))

    @property
    def split_labels(self) -> tuple[str, ...]:
        """Labels that get a slice per value."""
        if self.slices_itself:
            return SLICED
        splits = (rule.split or "" for rule in self.contract.slices)
        return tuple(f.removeprefix(LABEL) for f in splits if f.startswith(LABEL))

    def unsliced(
        self, labels: Mapping[str, Sequence[str]], first: Sequence[Labels]
    ) -> tuple[str, ...]:
        """A note about label values that first occur after the slices were fixed.

        Args:
            first: labels of the first step.
        """
        notes = []
        for name in self.split_labels:
            known = {value for own in first for field, value in own if field == name}
            new = [v for v in dict.fromkeys(labels.get(name, ())) if v and v not in known]
            if new:
                more = f" and {len(new) - 3} more values" if len(new) > 3 else ""
                what = f"{', '.join(map(repr, new[:3]))}{more} of label {name!r}"
                notes.append(f"{what} first occurred after the first step, so it has no slice")
        return tuple(notes)

    def slices(self, counts: Counts) -> tuple[int, tuple[SliceRule, ...], tuple[str, ...]]:
        """The window of a run and its slices, from its first step, and why others are omitted."""
        if not self.slices_itself:
            return of_run.MOST_STEPS, self.contract.slices, ()
        return of_run.run_slices(counts, of_run.needed(self.preset or "verl-sync"), 1)

    def complete(self, rules: Sequence[SliceRule]) -> Contract:
        """The contract with its slices."""
        if self.preset:
            declared = self.contract.bitwise
            made = of_run.contract_of(self.preset, self.preset, rules, bitwise=declared)[1]
            return made.model_copy(update={"trend": self.contract.trend})
        return self.contract.model_copy(update={"slices": tuple(rules)})


def _in_a_trainer(contract: Contract) -> Contract:
    """A contract adapted to a trainer's steps."""
    sides = {"train": contract.kernels.train, "infer": contract.kernels.infer}
    kernels = {
        side: k if k.engine == EXTERNAL else Kernel(engine=EXTERNAL, title=str(k))  # type: ignore[call-arg]
        for side, k in sides.items()
    }
    # the parts of a preset's contract other than clauses fit any contract
    frame = of_run.contract_of("verl-sync", "frame", ())[1]
    neither = {"workload": None, "claim": None}
    return contract.model_copy(
        update={
            "kernels": contract.kernels.model_copy(update=kernels),
            "stable": None,
            "weights": frame.weights,
            "workload": frame.workload,
            "workloads": None,
            "claim": frame.claim,
            "promotion": frame.promotion,
            "statistical": tuple(c.model_copy(update=neither) for c in contract.statistical),
            "observability": contract.observability.model_copy(
                update={
                    "clauses": tuple(
                        c.model_copy(update=neither) for c in contract.observability.clauses
                    )
                }
            ),
        }
    )


def plan_of(contract: Contract, labels: Sequence[Labels]) -> Plan:
    """The plan of a run, fixed at its first step.

    Args:
        labels: labels of the first step's sequences.

    Raises:
        ContractError: a slice needs a label that the first step lacks.
    """
    corpus = corpus_of("the first step", labels)
    plan = planning.make_plan(contract, {WORKLOAD: corpus}, None)
    return replace(plan, cells=tuple(map(_in_a_step, plan.cells)))


def _in_a_step(cell: Cell) -> Cell:
    """A cell as a step judges it."""
    if cell.clause.metric == DRAFT_ACCEPTANCE:  # counted beside the tokens of the step
        return replace(cell, kind=DraftAcceptance(), workload=WORKLOAD)
    return replace(cell, kind=_kind(cell))


def _kind(cell: Cell) -> Kind:
    """The kind of a cell for a step's log ratios; a reason if they do not suffice."""
    kind = cell.kind
    if not kind.applies:
        return kind
    reason = kind.not_in_a_step(cell.clause)
    if not reason:
        fields = sorted(f for f in cell.cut.fields if not (f in COLUMNS or f.startswith(LABEL)))
        reason = f"a training step has no {', '.join(fields)}" if fields else ""
    return NotHere(reason, bool(cell.clause.required)) if reason else kind


def labels_of(
    batch_labels: Mapping[str, Sequence[str]], names: Sequence[str]
) -> tuple[Labels, ...]:
    """The combinations of some labels, in order of first occurrence."""
    named = [name for name in names if name in batch_labels]
    rows = zip(*(batch_labels[name] for name in named), strict=True) if named else [()]
    labels = (tuple((n, v) for n, v in zip(named, row, strict=True) if v) for row in rows)
    return tuple(dict.fromkeys(labels))
