# The statistics of a dump: parts of its steps, added up in their order.
#
# A realised claim concerns all tokens together, so its statistics are additive and one sum is kept.
# Further sums are for the report: means by step, and by combination of slices.  Memory does not
# grow with the number of tokens.

from __future__ import annotations

import copy
import hashlib
import heapq
import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import WHOLE, Contract
from servanda.judgement import plan as planning
from servanda.judgement.breakdown import Removed, SequenceRow
from servanda.judgement.clauses.base import Cell
from servanda.judgement.clauses.guards import Counts, errors_of
from servanda.judgement.clauses.token_counts import CellStatistics, SliceCounts
from servanda.judgement.clauses.whole_responses import MEAN, of_responses, tails_of
from servanda.judgement.evidence import Evidence, Weighed, agreement_of, round_view
from servanda.judgement.field_rules import RuleSums
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Unit
from servanda.judgement.slices.atoms import Atoms, Classes, SliceCodes, atoms_of
from servanda.judgement.slices.columns import columns
from servanda.judgement.slices.rules import LABEL, Cut, cuts_of
from servanda.judgement.token_profile import Portrait, Sums, portray
from servanda.judgement.verdict import objection
from servanda.report.breakdown import removed_line
from servanda.report.format import count, number
from servanda.rl.dumps.checks import Finding, State
from servanda.rl.dumps.formats import Refused
from servanda.rl.steps.blocks import ContentDigest, paired
from servanda.rl.steps.contract import WORKLOAD, Labels, corpus_of
from servanda.rl.steps.drift import RunEnds, StepDrift, TokenSum
from servanda.rl.trend.changes import StepScalars
from servanda.theory.divergence.base import sampled
from servanda.theory.stats.agreement import MIXED, Agreement
from servanda.theory.stats.alpha import log_price, look_alpha, step_alpha
from servanda.theory.stats.tails import FarToken
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair

# The trained tokens of a block: their fields for slices, and the columns that its statistics share.
#
# Axes: S sequences, N trained tokens, K usable ones, which have both logprobs.


Array = NDArray[Any]
_COUNTED = ("context.length", "context.turn", "context.turn_position")  # whole, always known


@dataclass(frozen=True)
class PairFields:
    """The `TokenFields` of a pair."""

    pair: TracePair

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pair.infer.token_N.shape

    def labels(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        none = ("",) * len(self.pair.infer.length_S)
        return [*zip(*(self.pair.labels.get(name, none) for name in names), strict=True)]

    def of_sequences(self, code_S: Array) -> Array:
        return np.repeat(code_S, self.pair.infer.length_S)

    def codes(self, field: str, classes: Classes) -> tuple[Array, int]:
        trace, size = self.pair.infer, len(classes)
        if field == "request.prompt_tokens":
            return self.of_sequences(classes.of_values(trace.prompt_tokens_S)), size - 1
        if field == "context.position":
            return _looked_up(classes, self.pair.position_N), size - 1
        if field in _COUNTED and (name := field.partition(".")[2]) in trace.columns:
            return _looked_up(classes, trace.columns[name].astype(np.int32)), size - 1
        return classes.of_values(columns(self.pair, (), [field])[field]), size


def _looked_up(classes: Classes, count_N: Array) -> Array:
    return classes.of_counts(int(count_N.max(initial=0))).take(count_N)


class ScoredTokens:
    """The columns of a pair that several statistics use, each computed once."""

    def __init__(self, pair: TracePair) -> None:
        self.pair = pair
        self.usable_N = pair.usable_N
        self.train_K = pair.train.columns["logp"][self.usable_N]
        self.infer_K = pair.infer.columns["logp"][self.usable_N]
        self.log_ratio_K = self.train_K - self.infer_K  # -inf where train has no mass

    @cached_property
    def tv_K(self) -> Array:
        """(1 - w)^+ of each token."""
        return sampled("tv", {"logp_train": self.train_K, "logp_infer": self.infer_K})

    @cached_property
    def sequence_K(self) -> Array:
        """The sequence of each token."""
        length_S = self.pair.infer.length_S
        return np.repeat(np.arange(len(length_S)), length_S)[self.usable_N]

    @cached_property
    def size_K(self) -> Array:
        """|log ratio| of each token, nats."""
        return np.abs(self.log_ratio_K)

    @cached_property
    def drift_S(self) -> Array:
        """Sum of |log ratio| of each sequence, nats."""
        return self._by_sequence(self.size_K)

    @cached_property
    def mean_S(self) -> Array:
        """Mean |log ratio| of each sequence, nats; NaN without a usable token."""
        with np.errstate(invalid="ignore"):
            return self.drift_S / self.tokens_S

    @cached_property
    def gap_S(self) -> Array:
        """Sum of the log ratio of each sequence, nats."""
        return self._by_sequence(self.log_ratio_K)

    @cached_property
    def exp_S(self) -> Array:
        """Sum of exp |log ratio| of each sequence."""
        with np.errstate(over="ignore"):
            return self._by_sequence(np.exp(self.size_K))

    def _by_sequence(self, of_K: Array) -> Array:
        return np.bincount(self.sequence_K, of_K, minlength=len(self.pair.infer.length_S))

    @cached_property
    def tokens_S(self) -> Array:
        """Usable tokens of each sequence."""
        return np.bincount(self.sequence_K, minlength=len(self.pair.infer.length_S))


def response_statistic(cell: Cell, block: Rollouts, tokens: ScoredTokens) -> Any:
    """The statistic of a cell about whole responses, of all sequences of a block."""
    certificate, infer = cell.kind.certificate, tokens.pair.infer
    if certificate is not None:
        value_S = tokens.mean_S
        if cell.clause.metric != MEAN:
            value_S = of_responses(cell.clause.metric, tokens.log_ratio_K, tokens.tokens_S)
        return certificate.of_values(value_S[infer.length_S > 0])

    def place(s: int, k: int) -> FarToken:
        n = int(np.flatnonzero(tokens.usable_N)[k])
        return FarToken(
            float(tokens.size_K[k]),
            block.step,
            block.source_S[s],
            int(infer.columns["length"][n]),
            int(infer.token_N[n]),
            float(tokens.train_K[k]),
            float(tokens.infer_K[k]),
        )

    return tails_of(tokens.size_K, tokens.tokens_S, tokens.mean_S, place)


# Outliers: the sequences with the largest difference of the two sides.
#
# Each sequence is tested separately against the limit on mean (1 - w)^+, by an e-value with a
# threshold that grows with the number of sequences, so that a long healthy dump has no finding. An
# average over the dump cannot show one bad sequence in twenty; this test can.  Neither does it show
# the tokens that a filter of the trainer removed before it wrote the dump: their sums are kept too.


KEPT = 12
_BETS = np.array([3.0, 30.0])  # of the e-value: for many small and for few large deviations
_LIMIT = 0.025  # default as in the presets


def tv_limit(contract: Contract) -> float:
    """The limit on the mean of (1 - w)^+; twice this bounds the bias of the gradient."""
    limits = [
        float(clause.at_most)
        for clause in contract.statistical
        if clause.metric == "tv" and clause.enforced and isinstance(clause.at_most, float | int)
    ]
    return min(limits, default=_LIMIT)


@dataclass
class Outliers:
    """The sequences with the largest sum of (1 - w)^+ above the limit, and their number.

    Args:
        number: of the step in the dump, from 1; the steps share alpha.
        alpha: probability that any sequence of a conforming dump is called violated.
    """

    limit: float
    number: int = 1
    alpha: float = 0.01
    sequences: int = 0
    beyond: int = 0
    total: float = 0.0
    _worst: list[tuple[float, int, SequenceRow]] = field(default_factory=list)

    def add(
        self, block: Rollouts, tokens: ScoredTokens, *, removed: np.ndarray | None = None
    ) -> None:
        """Add a block of the step; `removed`: sequences removed by a filter, [S]."""
        size, at_K, tv_K, n_S = len(block), tokens.sequence_K, tokens.tv_K, tokens.tokens_S
        tv_S = np.bincount(at_K, tv_K, minlength=size)
        self.total += float(tv_S.sum())
        excess_S = tv_S - self.limit * n_S
        suspects = np.flatnonzero((n_S > 0) & (excess_S > 0))
        log_e = dict.fromkeys(suspects.tolist(), 0.0)
        ends_S = np.cumsum(n_S)
        for s in suspects.tolist():
            x = tv_K[ends_S[s] - n_S[s] : ends_S[s]]
            growth = [
                float(np.log1p(bet * x).sum() - len(x) * math.log1p(bet * self.limit))
                for bet in _BETS
            ]
            log_e[s] = float(np.logaddexp.reduce(growth) - math.log(len(growth)))
        alpha = step_alpha(self.alpha, self.number)
        beyond = {
            s
            for s, value in log_e.items()
            if value >= log_price(look_alpha(alpha, self.sequences + s + 1))
        }
        self.beyond += len(beyond)
        sum_S, exp_S = tokens.gap_S, tokens.exp_S
        # evidence before size: few tokens can differ strongly by chance
        for s in np.argsort(-excess_S, kind="stable")[: 4 * KEPT].tolist():
            if not n_S[s]:
                continue
            rank = float(excess_S[s]) + (1e6 if s in beyond else 0.0)
            if len(self._worst) == KEPT and rank <= self._worst[0][0]:
                continue
            row = SequenceRow(
                block.step,
                block.source_S[s],
                block.group_S[s],
                int(n_S[s]),
                float(sum_S[s]),
                float(exp_S[s] / n_S[s]),
                float(tv_S[s] / n_S[s]),
                float(tv_S[s]),
                s in beyond,
                bool(removed is not None and removed[s]),
            )
            self._keep((rank, -(self.sequences + s), row))
        self.sequences += size

    def join(self, later: Outliers) -> None:
        """Add the sequences of later steps."""
        for rank, at, row in later._worst:
            self._keep((rank, at - self.sequences, row))
        self.sequences += later.sequences
        self.beyond += later.beyond
        self.total += later.total

    def _keep(self, entry: tuple[float, int, SequenceRow]) -> None:
        push = heapq.heappush if len(self._worst) < KEPT else heapq.heappushpop
        push(self._worst, entry)

    def rows(self) -> tuple[SequenceRow, ...]:
        """The worst sequences, worst first, each with its share of the whole sum."""
        ordered = [row for *_, row in sorted(self._worst, key=lambda e: (-e[0], -e[1]))]
        return tuple(
            replace(row, share=row.share / self.total if self.total else 0.0) for row in ordered
        )


@dataclass
class RemovedTokens:
    """The removed sequences and tokens, and the sums of those that both sides scored."""

    sequences: int = 0
    tokens: int = 0
    n: int = 0
    tv: float = 0.0

    def add(
        self, block: Rollouts, removed_N: np.ndarray, kept: Sums, drawn_tv_K: np.ndarray
    ) -> None:
        """Add a block.

        Args:
            kept: sums over its tokens without the removed ones; drawn_tv_K: (1 - w)^+ of all.
        """
        self.sequences += len(np.unique(block.sequence_N[removed_N]))
        self.tokens += int(removed_N.sum())
        self.n += len(drawn_tv_K) - kept.n
        self.tv += float(drawn_tv_K.sum()) - kept.tv

    def join(self, later: RemovedTokens) -> None:
        """Add the tokens of later steps."""
        self.sequences += later.sequences
        self.tokens += later.tokens
        self.n += later.n
        self.tv += later.tv

    def removed(self, sequences: int, trained: int, kept: Sums) -> Removed | None:
        """The summary for reports; None if nothing was removed."""
        if not self.sequences:
            return None
        of = sequences, trained + self.tokens
        if not self.n or not kept.n:
            return Removed(self.sequences, self.tokens, *of)
        own, others = self.tv / self.n, kept.tv / kept.n
        before = (self.tv + kept.tv) / (self.n + kept.n)
        return Removed(self.sequences, self.tokens, *of, own, others, before)


# A part: all sums over one step of a dump.  It needs no other step, so parts can be computed in any
# process and in any order; `DumpStatistics` adds them up in the order of the steps.


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
        scalars: sums that are followed over the run; rules: what the rules of other projects need.
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
    rules: RuleSums = field(default_factory=RuleSums)
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
        # of the whole: one pass over the tokens that both sides scored
        self.whole = {
            i: c
            for i, c in enumerate(cells)
            if c.kind.reads in ("responses", "tails") and c.cut.name == WHOLE
        }
        answered, counted = self.cells.answered, (*self.kept, *self.whole)
        self.others = [i for i in range(len(cells)) if not answered[i] and i not in counted]
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
        self._responses: dict[int, Any] = {}  # index of a cell -> its statistic
        self._agreement = Agreement()
        self.tokens = self.sequences = 0

    def add(self, block: Rollouts, tokens: ScoredTokens) -> None:
        pair = tokens.pair
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
        for i, cell in self._of.whole.items():
            own = response_statistic(cell, block, tokens)
            self._responses[i] = own if i not in self._responses else self._responses[i] + own

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
        for i, statistic in self._responses.items():
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
        pair = paired(block, first)
        tokens = drawn = ScoredTokens(pair)
        removed_N = block.removed_N
        if removed_N is not None:
            drawn = ScoredTokens(paired(block, first, filtered=False))
            self._drawn = self._drawn or copy.deepcopy(self._trained)
        if self._drawn is not None:
            self._drawn.add(block, drawn)
        self._trained.add(block, tokens)
        atoms = atoms_of(self._of.cuts, PairFields(pair))
        portrait = portray(pair, _slices(self._of.cuts, atoms), (0,) * len(block))
        part.portrait += portrait
        sums = tokens.drift_S, tokens.gap_S, tokens.exp_S, float(tokens.size_K.max(initial=0.0))
        part.rules += RuleSums.of(portrait.total, pair.infer.length_S, *sums)
        self._by_group(pair, tokens)
        self._by_slices(tokens, atoms)
        removed_S = None
        if removed_N is not None:
            removed_S = np.bincount(block.sequence_N[removed_N], minlength=len(block)) > 0
            tokens = drawn
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


@dataclass
class DumpStatistics:
    """The statistics of the data read so far.

    Args:
        rows: combinations of labels -> their row in the corpus, those of the head; only labels that
            slices use.  A label that the head lacks has no slice.
        steps: the steps of the dump in order, each with the mean of every cell.
        ends: its first and last steps, which keep their prompt groups.
        atoms: combination of slices -> [tokens, sum of (1 - w)^+].
    """

    contract: Contract
    path: str
    rows: dict[Labels, int] = field(default_factory=dict)
    steps: dict[int, StepDrift] = field(default_factory=dict)
    ends: RunEnds = field(default_factory=RunEnds)
    atoms: dict[int, list[float]] = field(default_factory=dict)
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    turns: int = 0
    largest_staleness: float = 0.0
    outliers: Outliers = field(init=False)
    filter: RemovedTokens = field(default_factory=RemovedTokens)
    portrait: Portrait = field(default_factory=Portrait)
    scalars: StepScalars = field(default_factory=StepScalars)
    _sum: Weighed | None = None
    _before: Weighed | None = None  # including tokens removed by a filter; None if none were
    _open: StepSummation | None = None

    def __post_init__(self) -> None:
        self.outliers = Outliers(tv_limit(self.contract))
        self._digest = hashlib.blake2b(digest_size=16)

    @cached_property
    def values(self) -> dict[str, Container[str]]:
        """The values of labels that slices use; every value of a label that is split."""
        rules = self.contract.slices
        splits = (rule.split or "" for rule in rules)
        every = {field.removeprefix(LABEL) for field in splits if field.startswith(LABEL)}
        named: dict[str, set[str]] = {}
        for cut in itertools.chain.from_iterable(cuts_of(rules, corpus_of(self.path, ())).values()):
            for term in cut.terms:
                if term.op == "in" and term.field.startswith(LABEL):
                    named.setdefault(term.field.removeprefix(LABEL), set()).update(term.value)
                elif term.field.startswith(LABEL):  # it has to exist, or not to
                    every.add(term.field.removeprefix(LABEL))
        return {**named, **dict.fromkeys(every, EVERY)}

    def add_labels(self, pair: TracePair) -> None:
        """Add the labels of sequences of the head, before its first block is added."""
        for own in labels_of(pair, self.values):
            self.rows.setdefault(own, len(self.rows))

    def _add_unmet(self) -> None:
        """Add labels for slices that no sequence is in: such a slice is inconclusive."""
        first = dict(next(iter(self.rows), ()))
        of_rules = cuts_of(self.contract.slices, corpus_of(self.path, ())).values()
        for cut in itertools.chain.from_iterable(of_rules):
            terms = [term for term in cut.terms if term.field.startswith(LABEL)]
            named = [(term.field.removeprefix(LABEL), term) for term in terms]
            rows = map(dict, self.rows)
            if not any(all(term.met_by(row.get(name)) for name, term in named) for row in rows):
                own = {n: min(t.value) if t.op == "in" else "any" for n, t in named if t.value}
                self.rows[tuple(sorted({**first, **own}.items()))] = len(self.rows)

    @cached_property
    def measures(self) -> Measures:
        """The measures on each step: the cells are fixed here."""
        self._add_unmet()
        corpus = corpus_of(self.path, self.rows)
        return Measures(planning.make_plan(self.contract, {WORKLOAD: corpus}, None))

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every slice except the whole, in the order of the plan."""
        return self.measures.cuts

    def add(self, block: Rollouts) -> None:
        """Add one block, in the order of the dump.

        Raises:
            EvidenceError: shapes within the block differ.
        """
        if self._open is None or self._open.step != block.step:
            self._close()
            self._open = StepSummation(self.measures, block.step, len(self.steps) + 1)
        self._open.add(block)

    def _close(self) -> None:
        if self._open is not None:
            part, self._open = self._open.close(), None
            self.join(part)

    def join(self, part: StepPart) -> None:
        """Add the next step."""
        self.steps[part.step] = part.sums
        if (middle := self.ends.add(part.sums)) is not None:
            middle.groups.clear()
        if part.drawn is not None or self._before is not None:
            drawn = part.drawn or part.weighed
            before = self._before or self._sum
            self._before = drawn if before is None else before + drawn
        self._sum = part.weighed if self._sum is None else self._sum + part.weighed
        for key, (n, tv) in part.atoms.items():
            atom = self.atoms.setdefault(key, [0, 0.0])
            atom[0] += n
            atom[1] += tv
        self.portrait += part.portrait
        self.scalars += part.scalars
        self.outliers.join(part.outliers)
        self.filter.join(part.filter)
        self._digest.update(part.digest.encode())
        self.sequences += part.sequences
        self.tokens += part.tokens
        self.trained += part.trained
        self.turns = max(self.turns, part.turns)
        self.largest_staleness = max(self.largest_staleness, part.staleness)

    def before_filter(self, evidence: Evidence) -> Evidence | None:
        """The evidence including tokens removed by a filter; None if none were."""
        if self._before is None:
            return None
        return replace(evidence, rounds={(WORKLOAD, 0): self._before})

    @property
    def removed(self) -> Removed | None:
        return self.filter.removed(self.sequences, self.trained, self.portrait.total)

    @property
    def agreement(self) -> Agreement:
        """Whether the two columns could have disagreed, and did."""
        return Agreement() if self._sum is None else self._sum.agreement

    def evidence(self) -> tuple[Plan, Evidence]:
        """The evidence of the whole dump, keyed by its content."""
        self._close()
        assert self._sum is not None
        plan, digest = self.measures.plan, self._digest.hexdigest()
        corpus = replace(plan.corpora[WORKLOAD], digest=digest)
        plan = replace(plan, corpora={WORKLOAD: corpus})
        steps = [*self.steps]
        key = EvidenceKey(
            contract=plan.contract.digest,
            corpus=digest,
            train="external",
            infer="external",
            weights=f"{min(steps)}..{max(steps)}",  # evidence names its steps
            grade="declared",
        )
        portraits = {(WORKLOAD, "infer"): self.portrait}
        return plan, Evidence(key, plan.digest, {(WORKLOAD, 0): self._sum}, portraits=portraits)


def labels_of(pair: TracePair, values: Mapping[str, Container[str]]) -> list[Labels]:
    """The labels of each sequence, restricted to values that slices use.

    Args:
        values: name of a label -> the values used.
    """
    names = [name for name in sorted(pair.labels) if name in values]
    if not names:
        return [()] * len(pair.infer.sequence_S)
    columns = zip(*(pair.labels[name] for name in names), strict=True)
    return [
        tuple((n, v) for n, v in zip(names, row, strict=True) if v and v in values[n])
        for row in columns
    ]


class _Every(Container[str]):
    def __contains__(self, _: object) -> bool:
        return True


EVERY = _Every()  # of a label that is split, or has to exist


# Data quality checks of a dump, as reports print them.


_SHARE = 0.001  # accepted share of rejected sequences; with more, the rest is no sample of the run
_ZERO = "all zero"
_SHOWN = 6  # most steps in a line
_ENOUGH, _WORSE = 200, 1.5  # least removed tokens, and ratio of their mean to that of others
_ORDER = ("error", "warning", "fine")
Level = Literal["error", "warning", "fine"]
_LEVELS: Mapping[State, Level] = {"unsound": "error", "warning": "warning", "ok": "fine"}


@dataclass(frozen=True)
class DataLine:
    """One finding about the data; an error prevents a verdict.  `problem`: its check, or ""."""

    level: Level
    text: str
    problem: str = ""


def data_lines(
    findings: Sequence[Finding],
    refused: Refused,
    taken: int,
    empty: Mapping[int, str] | None = None,
    statistics: DumpStatistics | None = None,
) -> tuple[DataLine, ...]:
    """All findings about the data, worst first.

    Args:
        taken: number of accepted sequences.
        empty: steps without a sequence -> their first file.
        statistics: statistics of the whole dump.
    """
    lines = [*of_refused(refused, taken), *of_empty(empty or {})]
    lines += [DataLine(_LEVELS[f.state], f.placed) for f in findings]
    if statistics is not None:
        lines += [*of_outliers(statistics.outliers), *of_filter(statistics.removed)]
    return tuple(sorted(lines, key=lambda line: _ORDER.index(line.level)))


def sides(contract: Contract, agreement: Agreement) -> tuple[Finding, ...]:
    """The reason why the two columns could not have disagreed; empty if they could."""
    if not (copied := objection(contract, agreement)):
        return ()
    numbers = {"tokens": float(agreement.tokens), "equal": float(agreement.equal)}
    odd = None if agreement.everywhere else (*alike(agreement), MIXED)
    return (Finding("sides", "unsound", copied, numbers, odd=odd),)


def alike(agreement: Agreement) -> tuple[int, int]:
    """The number of possibly copied sequences, and of all."""
    return max(agreement.copies, agreement.close), agreement.sequences


def of_refused(refused: Refused, taken: int) -> list[DataLine]:
    """Rejected sequences: a few are skipped, more make the data unsound."""
    if not refused.rows:
        return [DataLine("fine", "no sequence was rejected")]
    lines = []
    for refusal in refused.values():
        share = refusal.count / (taken + refused.rows)
        zero = _ZERO in refusal.reason
        level: Level = "error" if zero or share > _SHARE else "warning"
        rows = count(refusal.count, "sequence")
        text = f"{rows} rejected: {refusal.reason} (first: {refusal.first})"
        lines.append(DataLine(level, text, "coverage" if zero else ""))
    return lines


def of_empty(empty: Mapping[int, str]) -> list[DataLine]:
    """Steps with a file but without a usable sequence, which were not judged."""
    if not empty:
        return []
    steps = ", ".join(map(str, [*empty][:_SHOWN])) + (" …" if len(empty) > _SHOWN else "")
    subject = f"step {steps} has" if len(empty) == 1 else f"steps {steps} have"
    text = f"{subject} no sequence that can be "
    return [DataLine("warning", f"{text}used (first: {next(iter(empty.values()))})")]


def of_outliers(outliers: Outliers) -> list[DataLine]:
    """Single sequences that exceed the limit, which an average over the dump does not show."""
    if not outliers.beyond:
        return []
    worst = outliers.rows()[0]
    count = f"{outliers.beyond:,} of {outliers.sequences:,} sequences"
    text = (
        f"{count} {'is' if outliers.beyond == 1 else 'are'} above the limit on their own tokens "
        f"(worst: {worst.source}, tv {number(worst.tv)})"
    )
    return [DataLine("warning", text)]


def of_filter(removed: Removed | None) -> list[DataLine]:
    """Removals by a filter of the trainer: a warning if it removed mismatching tokens."""
    if removed is None:
        return []
    enough = removed.tokens >= _ENOUGH and removed.tv is not None and removed.kept is not None
    worse = enough and (removed.tv or 0.0) > _WORSE * (removed.kept or 0.0)
    return [DataLine("warning" if worse else "fine", removed_line(removed))]
