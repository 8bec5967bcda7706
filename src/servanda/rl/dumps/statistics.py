# The statistics of a dump: computed block by block; each block is dropped after summation.
#
# A realised claim concerns all tokens together, so its statistics are additive and one sum is kept.
# Further sums are for the report: means by step, and by combination of slices.  Memory does not
# grow with the number of tokens.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import WHOLE, Contract
from servanda.judgement import plan as planning
from servanda.judgement.breakdown import Removed
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.evidence import Evidence, Round, Weighed, weigh
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Unit
from servanda.judgement.slices.columns import columns
from servanda.judgement.slices.rules import LABEL, Cut, cuts_of
from servanda.judgement.token_profile import Sums
from servanda.rl.dumps.blocks import ContentDigest, paired
from servanda.rl.dumps.filters import RemovedTokens
from servanda.rl.dumps.outliers import Outliers, tv_limit
from servanda.rl.dumps.preset import WORKLOAD
from servanda.rl.dumps.slicing import Labels, corpus_of
from servanda.rl.dumps.steps import RunEnds, StepSums, TokenSum
from servanda.rl.dumps.transform import Transform
from servanda.theory.divergence.base import sampled
from servanda.theory.stats.agreement import Agreement
from servanda.traces.corpus import Prompt
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair

Array = NDArray[Any]
_BITS = 62  # bits of the number that encodes the slices of a token


@dataclass
class DumpStatistics:
    """The statistics of the data read so far.

    Args:
        rows: labels of sequences -> their row in the corpus, those of the head first; only labels
            that slices use.
        steps: the steps of the dump in order, each with the mean of every cell.
        ends: its first and last steps, which keep their prompt groups.
        atoms: combination of slices -> [tokens, sum of (1 - w)^+].
        step_sums, step_weighed, step_drawn, step_atoms: of the last step.
    """

    contract: Contract
    path: str
    rows: dict[Labels, int] = field(default_factory=dict)
    steps: dict[int, StepSums] = field(default_factory=dict)
    ends: RunEnds = field(default_factory=RunEnds)
    atoms: dict[int, list[float]] = field(default_factory=dict)
    transform: Transform = field(default_factory=Transform)
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    turns: int = 0
    largest_staleness: float = 0.0
    digest: ContentDigest = field(default_factory=ContentDigest)
    outliers: Outliers = field(init=False)
    step_sums: Sums = field(default_factory=Sums)
    step_weighed: Weighed | None = None
    step_drawn: Weighed | None = None  # including tokens removed by a filter; None if none were
    step_atoms: dict[int, list[float]] = field(default_factory=dict)
    filter: RemovedTokens = field(default_factory=RemovedTokens)
    _plan: Plan | None = None
    _before: Weighed | None = None  # including tokens removed by a filter; None if none were
    _sum: Weighed | None = None
    _portraits: Mapping[Any, Any] = field(default_factory=dict)
    _groups: set[str] = field(default_factory=set)
    _launched: int = 0

    def __post_init__(self) -> None:
        self.outliers = Outliers(tv_limit(self.contract))

    @cached_property
    def values(self) -> dict[str, set[str]]:
        """The values of labels that slices use."""
        cuts = cuts_of(self.contract.slices, corpus_of(self.path, ()))
        return label_values(cut for named in cuts.values() for cut in named)

    def add_labels(self, pair: TracePair) -> list[int]:
        """Add the labels of sequences; returns their rows in the corpus."""
        labels = labels_of(pair, self.values)
        return [self.rows.setdefault(own, len(self.rows)) for own in labels]

    def add(self, block: Rollouts) -> None:
        """Add one block.

        Raises:
            EvidenceError: shapes within the block differ.
        """
        pair = paired(block, self.sequences)
        rows = self.add_labels(pair)
        if self._plan is None or len(self._plan.corpora[WORKLOAD]) < len(self.rows):
            # labels missing in the head have no slice, so the cells stay the same
            cells = self._plan.cells if self._plan else None
            corpus = corpus_of(self.path, self.rows)
            plan = planning.make_plan(self.contract, {WORKLOAD: corpus}, None)
            self._plan = replace(plan, cells=cells) if cells else plan
        groups = {g: i for i, g in enumerate(dict.fromkeys(pair.group_S))}
        units = tuple(
            Unit(int(s), row, groups[g])
            for s, row, g in zip(pair.infer.sequence_S, rows, pair.group_S, strict=True)
        )
        evidence = weigh(self._plan, EMPTY, [Round(WORKLOAD, 0, units, pair)])
        weighed = everything = _of_record(evidence)
        total = evidence.portraits[WORKLOAD, "infer"].total
        drawn = pair
        if (removed_N := block.removed_N) is not None:
            drawn = paired(block, self.sequences, filtered=False)
            both = weigh(self._plan, EMPTY, [Round(WORKLOAD, 0, units, drawn)])
            everything = _of_record(both)
            self.filter.add(block, removed_N, total, both.portraits[WORKLOAD, "infer"].total)
        if removed_N is not None or self._before is not None:
            self._before = _plus(self._before or self._sum, everything)
        self._sum = _plus(self._sum, weighed)
        merged = Evidence(EMPTY, "", portraits=self._portraits) + Evidence(
            EMPTY, "", portraits=evidence.portraits
        )
        self._portraits = merged.portraits
        self._by_step(block, pair, weighed, None if removed_N is None else everything)
        self.step_sums += total
        self._by_slices(pair)
        removed_S = None
        if removed_N is not None:
            removed_S = np.bincount(block.sequence_N[removed_N], minlength=len(block)) > 0
        self.outliers.add(block, drawn, removed=removed_S)
        self.digest.add(block)
        self.sequences += len(block)
        self.tokens += len(block.token_N)
        self.trained += len(pair.infer.token_N)
        self.turns = max(self.turns, int(pair.infer.columns["turn"].max(initial=0)))
        staleness_N = pair.infer.columns.get("staleness", np.zeros(0))
        if (known_N := staleness_N[~np.isnan(staleness_N)]).size:
            self.largest_staleness = max(self.largest_staleness, float(known_N.max()))

    def _by_step(
        self, block: Rollouts, pair: TracePair, weighed: Weighed, drawn: Weighed | None
    ) -> None:
        assert self._plan is not None
        if block.step not in self.steps:
            self.steps[block.step] = StepSums(block.step)
            self._groups = set()
            self.step_sums, self.step_atoms = Sums(), {}
            self.step_weighed = self.step_drawn = None
            if (middle := self.ends.add(self.steps[block.step])) is not None:
                middle.groups.clear()
                middle.drift.clear()
        if drawn is not None or self.step_drawn is not None:
            self.step_drawn = _plus(self.step_drawn or self.step_weighed, drawn or weighed)
        self.step_weighed = _plus(self.step_weighed, weighed)
        step = self.steps[block.step]
        step.sequences += len(block)
        step.tokens += len(pair.infer.token_N)
        fresh = set(pair.group_S) - self._groups
        self._groups |= fresh
        self._launched += len(fresh)
        for i, statistic in enumerate(weighed.statistics):
            if isinstance(self._plan.cells[i].kind, Certificate):
                process = statistic.process
                step.add(i, process.total, process.known)
        log_ratio_N = pair.train.columns["logp"] - pair.infer.columns["logp"]
        usable_N = pair.usable_N & np.isfinite(log_ratio_N)
        length_S = pair.infer.length_S
        sequence_N = np.repeat(np.arange(len(length_S)), length_S)[usable_N]
        sums_S = np.bincount(sequence_N, np.abs(log_ratio_N[usable_N]), minlength=len(length_S))
        n_S = np.bincount(sequence_N, minlength=len(length_S))
        step.drift += zip(sums_S.tolist(), n_S.tolist(), strict=True)
        ids = {name: i for i, name in enumerate(dict.fromkeys(pair.group_S))}
        group_N = np.repeat(np.array([ids[name] for name in pair.group_S]), length_S)
        sum_G = np.bincount(group_N[usable_N], np.abs(log_ratio_N[usable_N]))
        n_G = np.bincount(group_N[usable_N])
        sums = map(TokenSum, sum_G.tolist(), n_G.tolist())
        step.add_groups(dict(zip(ids, sums, strict=False)))

    def _by_slices(self, pair: TracePair) -> None:
        masks = masks_of(self.cuts, pair)
        bits_N = np.zeros(len(pair.infer.token_N), dtype=np.int64)
        for i, cut in enumerate(self.cuts):
            bits_N |= masks[cut].astype(np.int64) << i
        usable_N = pair.usable_N
        logp = {f"logp_{s}": getattr(pair, s).columns["logp"][usable_N] for s in ("train", "infer")}
        self.transform.add(logp["logp_train"], logp["logp_infer"])
        tv_N = sampled("tv", logp)
        keys, at_N = np.unique(bits_N[usable_N], return_inverse=True)
        n_K, tv_K = np.bincount(at_N), np.bincount(at_N, tv_N)
        for key, n, tv in zip(keys.tolist(), n_K.tolist(), tv_K.tolist(), strict=True):
            for atoms in (self.atoms, self.step_atoms):
                atom = atoms.setdefault(key, [0, 0.0])
                atom[0] += n
                atom[1] += tv

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every slice except the whole, in the order of the plan."""
        assert self._plan is not None
        named = (c.cut for c in self._plan.cells if c.cut.name != WHOLE)
        cuts = tuple(dict.fromkeys(named))
        assert len(cuts) <= _BITS  # a dump has at most 40 slices
        return cuts

    def before_filter(self, evidence: Evidence) -> Evidence | None:
        """The evidence including tokens removed by a filter; None if none were."""
        if self._before is None:
            return None
        whole = replace(self._before, groups=self._launched)
        return replace(evidence, rounds={(WORKLOAD, 0): whole})

    @property
    def removed(self) -> Removed | None:
        total = self._portraits[WORKLOAD, "infer"].total
        return self.filter.removed(self.sequences, self.trained, total)

    def of_step(self) -> tuple[Plan, Evidence, Evidence | None]:
        """The evidence of the last step, and the same including removed tokens."""
        plan, groups = self._plan, len(self._groups)
        assert plan is not None and self.step_weighed is not None
        trained, drawn = (
            of and Evidence(EMPTY, plan.digest, {(WORKLOAD, 0): replace(of, groups=groups)})
            for of in (self.step_weighed, self.step_drawn)
        )
        assert trained is not None
        return plan, trained, drawn

    @property
    def agreement(self) -> Agreement:
        """Whether the two columns could have disagreed, and did."""
        return Agreement() if self._sum is None else self._sum.agreement

    def evidence(self) -> tuple[Plan, Evidence]:
        """The evidence of the whole dump, keyed by its content."""
        assert self._plan is not None and self._sum is not None
        digest = self.digest.value
        corpus = replace(self._plan.corpora[WORKLOAD], digest=digest)
        plan = replace(self._plan, corpora={WORKLOAD: corpus})
        steps = [*self.steps]
        key = EvidenceKey(
            contract=plan.contract.digest,
            corpus=digest,
            train="external",
            infer="external",
            weights=f"{min(steps)}..{max(steps)}",  # evidence names its steps
            grade="declared",
        )
        whole = replace(self._sum, groups=self._launched)
        return plan, Evidence(
            key, plan.digest, {(WORKLOAD, 0): whole}, portraits=dict(self._portraits)
        )


EMPTY = EvidenceKey("", "", "external", "external", "", grade="declared")


def labels_of(pair: TracePair, values: Mapping[str, Collection[str]]) -> list[Labels]:
    """The labels of each sequence, restricted to values that slices use.

    Args:
        values: name of a label -> the values used.
    """
    names = [name for name in sorted(pair.labels) if name in values]
    if not names:
        return [()] * len(pair.infer.sequence_S)
    columns = zip(*(pair.labels[name] for name in names), strict=True)
    return [
        tuple((n, v) for n, v in zip(names, row, strict=True) if v in values[n]) for row in columns
    ]


def label_values(cuts: Iterable[Cut]) -> dict[str, set[str]]:
    """The label values that slices use."""
    values: dict[str, set[str]] = {}
    for term in (term for cut in cuts for term in cut.terms if term.field.startswith(LABEL)):
        values.setdefault(term.field.removeprefix(LABEL), set()).update(term.value)
    return values


def masks_of(cuts: Iterable[Cut], pair: TracePair) -> dict[Cut, Array]:
    """The mask of trained tokens of each slice, [N]."""
    cuts = [*cuts]
    prompts = [Prompt(0, labels=dict(own)) for own in labels_of(pair, label_values(cuts))]
    fields = columns(pair, prompts, {field for cut in cuts for field in cut.fields})
    return {cut: cut.mask(fields, len(pair.infer.token_N)) for cut in cuts}


def added(mine: Weighed, other: Weighed) -> Weighed:
    """Two rounds of a realised claim as one."""
    pairs = zip(mine.statistics, other.statistics, strict=True)
    return Weighed(
        tuple(None if own is None else own + more for own, more in pairs),
        mine.noise,
        sequences=mine.sequences + other.sequences,
        tokens=mine.tokens + other.tokens,
        lost=mine.lost + other.lost,
        groups=mine.groups + other.groups,
        agreement=mine.agreement + other.agreement,
    )


def _of_record(evidence: Evidence) -> Weighed:
    """The statistics of a block; in a dump no continuation counts as missing."""
    return replace(evidence.rounds[WORKLOAD, 0], unended=0)


def _plus(mine: Weighed | None, other: Weighed) -> Weighed:
    return other if mine is None else added(mine, other)
