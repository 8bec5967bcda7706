# A part: all sums over one step of a dump.  It needs no other step, so parts can be computed in any
# process and in any order; `DumpStatistics` adds them up in the order of the steps.

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.guards import Counts, errors_of
from servanda.judgement.clauses.token_counts import CellStatistics, SliceCounts
from servanda.judgement.evidence import Weighed, agreement_of, round_view
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Unit
from servanda.judgement.slices.atoms import Atoms, SliceCodes, atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.judgement.token_profile import Portrait, portray
from servanda.rl.dumps.outliers import Outliers, RemovedTokens, tv_limit
from servanda.rl.dumps.token_fields import PairFields, ScoredTokens
from servanda.rl.steps.blocks import ContentDigest, paired
from servanda.rl.steps.contract import corpus_of
from servanda.rl.steps.drift import StepDrift, TokenSum
from servanda.rl.trend.changes import StepScalars
from servanda.theory.stats.agreement import Agreement
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair

Array = NDArray[Any]
_BITS = 62  # bits of the number that encodes the slices of a token


@dataclass
class StepPart:
    """The sums over one step.

    Args:
        number: of the step in the dump, from 1.
        groups: prompt groups; trained: trained tokens; tokens: all tokens.
        weighed: statistics of the trained tokens; drawn: including the tokens that a filter of the
            trainer removed, None if it removed none.
        atoms: combination of slices -> [tokens, sum of (1 - w)^+].
        digest: of all data of the step.
        scalars: sums that are followed over the run.
        turns: most turns of a sequence; staleness: largest age of a token, in updates.
    """

    number: int
    sums: StepDrift
    groups: int = 0
    tokens: int = 0
    weighed: Weighed = field(default_factory=lambda: Weighed((), ()))
    drawn: Weighed | None = None
    atoms: dict[int, list[float]] = field(default_factory=dict)
    portrait: Portrait = field(default_factory=Portrait)
    outliers: Outliers = field(default_factory=lambda: Outliers(0.0))
    filter: RemovedTokens = field(default_factory=RemovedTokens)
    digest: str = ""
    scalars: StepScalars = field(default_factory=StepScalars)
    turns: int = 0
    staleness: float = 0.0

    @property
    def step(self) -> int:
        return self.sums.step

    @property
    def sequences(self) -> int:
        return self.sums.sequences

    @property
    def trained(self) -> int:
        return self.sums.tokens


class Measures:
    """The measures of a plan on steps of a dump, prepared once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cells = plan.cells
        self.cuts = tuple(dict.fromkeys(c.cut for c in cells if c.cut.name != WHOLE))
        assert len(self.cuts) <= _BITS  # a dump has at most 40 slices
        self.cells = CellStatistics(cells, self.cuts, contributions=True)
        self.kept = [
            i for i, c in enumerate(cells) if c.kind.reads == "removed" and c.cut.name == WHOLE
        ]
        answered = self.cells.answered
        self.others = [i for i in range(len(cells)) if not answered[i] and i not in self.kept]
        of_slices = any(c.kind.reads == "lower" and c.cut.name != WHOLE for c in cells)
        self.coherent_cuts = self.cuts if of_slices else ()
        self.limit = tv_limit(plan.contract)


class _Sums:
    """The statistics of every cell over some tokens, block by block."""

    def __init__(self, measures: Measures) -> None:
        self._of = measures
        self._counts = SliceCounts(measures.cuts)
        self._lower = SliceCounts(measures.coherent_cuts)
        self._kept = Counts()
        self._others: list[Any] = [None] * len(measures.others)
        self._agreement = Agreement()
        self.tokens = self.sequences = 0

    def add(self, pair: TracePair) -> None:
        train_N, infer_N = (side.columns["logp"] for side in (pair.train, pair.infer))
        fields, all_N = PairFields(pair), np.ones(len(train_N), dtype=bool)
        self._counts.add(fields, train_N, infer_N, all_N)
        error_N = errors_of(pair.train) + errors_of(pair.infer)
        self._lower.add(fields, train_N - error_N, infer_N, all_N)
        removed = int((pair.infer.columns["removed"] == 1).sum())
        self._kept += Counts(len(train_N) - removed, len(train_N))
        self._agreement += agreement_of(pair)
        self.tokens += len(train_N)
        self.sequences += len(pair.infer.length_S)
        for at, statistic in enumerate(self._weighed_alone(pair)):
            known = self._others[at]
            self._others[at] = statistic if known is None else known + statistic

    def _weighed_alone(self, pair: TracePair) -> list[Any]:
        """The statistics of the cells that counts do not answer."""
        plan, others = self._of.plan, self._of.others
        if not others:
            return []
        cells = [plan.cells[i] for i in others]
        texts = [*zip(*pair.labels.values(), strict=True)] or [()] * len(pair.infer.length_S)
        rows = {own: row for row, own in enumerate(dict.fromkeys(texts))}
        corpus = corpus_of("block", (tuple(zip(pair.labels, own, strict=True)) for own in rows))
        (schedule,) = replace(plan, corpora=dict.fromkeys(plan.corpora, corpus)).schedules
        groups = {g: i for i, g in enumerate(dict.fromkeys(pair.group_S))}
        sequences = zip(pair.infer.sequence_S.tolist(), texts, pair.group_S, strict=True)
        units = tuple(Unit(s, rows[own], groups[g]) for s, own, g in sequences)
        view = round_view(schedule, cells, units, pair)
        return [cell.kind.weigh(cell, view) for cell in cells]

    @property
    def scalars(self) -> StepScalars:
        return StepScalars.of(self._counts.count_CK[0], int(self._counts.lost_C[0]))

    def weighed(self) -> Weighed:
        of = self._of
        statistics = self._of.cells.of(self._counts, lower=self._lower)
        for i, cell in enumerate(of.plan.cells):
            if of.cells.answered[i]:
                statistics[i] = cell.kind.join([statistics[i]])
        for i in of.kept:
            statistics[i] = self._kept
        for i, statistic in zip(of.others, self._others, strict=True):
            statistics[i] = statistic
        return Weighed(
            tuple(statistics),
            ((),) * len(statistics),  # a dump has no noise floor
            sequences=self.sequences,
            tokens=self.tokens,
            agreement=self._agreement,
        )


class StepSummation:
    """Adds up the blocks of one step."""

    def __init__(self, measures: Measures, step: int, number: int) -> None:
        self._of = measures
        outliers = Outliers(measures.limit, number)
        self._part = StepPart(number, StepDrift(step), outliers=outliers)
        self._trained = _Sums(measures)
        self._drawn: _Sums | None = None  # None as long as no token was removed
        self._groups: dict[str, None] = {}
        self._digest = ContentDigest()

    @property
    def step(self) -> int:
        return self._part.step

    def add(self, block: Rollouts) -> None:
        """Add one block of the step.

        Raises:
            EvidenceError: shapes within the block differ.
        """
        part = self._part
        first = part.sequences
        pair = drawn = paired(block, first)
        removed_N = block.removed_N
        if removed_N is not None:
            drawn = paired(block, first, filtered=False)
            self._drawn = self._drawn or copy.deepcopy(self._trained)
        if self._drawn is not None:
            self._drawn.add(drawn)
        self._trained.add(pair)
        tokens = ScoredTokens(pair)
        atoms = atoms_of(self._of.cuts, PairFields(pair))
        portrait = portray(pair, _slices(self._of.cuts, atoms), (0,) * len(block))
        part.portrait += portrait
        self._by_group(pair, tokens)
        self._by_slices(tokens, atoms)
        removed_S = None
        if removed_N is not None:
            removed_S = np.bincount(block.sequence_N[removed_N], minlength=len(block)) > 0
            tokens = ScoredTokens(drawn)
            part.filter.add(block, removed_N, portrait.total, tokens.tv_K)
        part.outliers.add(block, tokens, removed=removed_S)
        self._digest.add(block)
        part.tokens += len(block.token_N)
        part.sums.sequences += len(block)
        part.sums.tokens += len(pair.infer.token_N)
        part.turns = max(part.turns, int(pair.infer.columns["turn"].max(initial=0)))
        staleness_N = pair.infer.columns.get("staleness", np.zeros(0))
        if (known_N := staleness_N[~np.isnan(staleness_N)]).size:
            part.staleness = max(part.staleness, float(known_N.max()))

    def close(self) -> StepPart:
        part = self._part
        part.groups, part.digest = len(self._groups), self._digest.value
        part.scalars = self._trained.scalars
        part.weighed = replace(self._trained.weighed(), groups=part.groups)
        if self._drawn is not None:
            part.drawn = replace(self._drawn.weighed(), groups=part.groups)
        for i, cell in enumerate(self._of.plan.cells):
            if cell.kind.certificate:
                process = part.weighed.statistics[i].process
                part.sums.add(i, process.total, process.known)
        return part

    def _by_group(self, pair: TracePair, tokens: ScoredTokens) -> None:
        """The sums of |log ratio| of each sequence and of each prompt group."""
        size = len(pair.infer.length_S)
        known_K = np.isfinite(tokens.log_ratio_K)
        sequence_K = tokens.sequence_K[known_K]
        sum_S = np.bincount(sequence_K, np.abs(tokens.log_ratio_K[known_K]), minlength=size)
        n_S = np.bincount(sequence_K, minlength=size)
        names = {name: i for i, name in enumerate(dict.fromkeys(pair.group_S))}
        group_S = np.array([names[name] for name in pair.group_S], dtype=np.int64)
        sum_G = np.bincount(group_S, sum_S, minlength=len(names))
        n_G = np.bincount(group_S, n_S, minlength=len(names)).astype(np.int64)
        sums = map(TokenSum, sum_G.tolist(), n_G.tolist())
        self._part.sums.add_groups(dict(zip(names, sums, strict=True)))
        self._groups |= dict.fromkeys(names)

    def _by_slices(self, tokens: ScoredTokens, atoms: Atoms) -> None:
        atom_K = atoms.atom[tokens.usable_N]
        n_A = np.bincount(atom_K, minlength=len(atoms)).tolist()
        tv_A = np.bincount(atom_K, tokens.tv_K, minlength=len(atoms)).tolist()
        for bits, n, tv in zip(atoms.bits_A, n_A, tv_A, strict=True):
            if n:
                atom = self._part.atoms.setdefault(bits, [0, 0.0])
                atom[0] += n
                atom[1] += tv


def _slices(cuts: Sequence[Cut], atoms: Atoms) -> SliceCodes:
    """The whole and each slice, for a token profile."""
    inside_CA = np.vstack([np.ones((1, len(atoms)), dtype=bool), atoms.inside_CA])
    return SliceCodes((WHOLE, *(cut.name for cut in cuts)), atoms.atom, inside_CA)
