# Weighing a dump: block by block to evidence, each block dropped once it is weighed.
#
# A realised claim speaks of all tokens at once, so its statistics add up exactly and one sum
# is kept.  Beside it stands what the text tells: means by step, and by which slices a token
# lies in.  None of it grows with the number of tokens.

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from servanda.rl.dumps.filters import Tally
from servanda.rl.dumps.outliers import Outliers, tv_limit
from servanda.rl.dumps.steps import ENDS, GroupSums, Step
from servanda.rl.dumps.transform import Transform
from servanda.theory.divergence.base import sampled
from servanda.theory.stats.agreement import Agreement
from servanda.traces.corpus import Corpus, Prompt
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair

Array = NDArray[Any]
Kind = tuple[tuple[str, str], ...]  # the labels of a sequence

WORKLOAD = "workload"
_BITS = 62  # of a number that says in which slices a token lies


@dataclass
class Weighing:
    """What has been read so far.

    Args:
        kinds: labels of sequences -> their row in the corpus, those of the head first; only
            labels that a slice asks for, so that there are few.
        steps: of the dump, in its order, each with the mean of every cell.
        atoms: in which slices -> [tokens, sum of (1 - w)^+].
    """

    contract: Contract
    path: str
    kinds: dict[Kind, int] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    atoms: dict[int, list[float]] = field(default_factory=dict)
    transform: Transform = field(default_factory=Transform)
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    turns: int = 0
    largest_staleness: float = 0.0
    digest: ContentDigest = field(default_factory=ContentDigest)
    outliers: Outliers = field(init=False)
    # of the last step
    step_sums: Sums = field(default_factory=Sums)
    step_weighed: Weighed | None = None
    step_drawn: Weighed | None = None  # with what a filter removed; None where it removed nothing
    step_atoms: dict[int, list[float]] = field(default_factory=dict)
    filter: Tally = field(default_factory=Tally)
    _plan: Plan | None = None
    _before: Weighed | None = None  # with what a filter removed; None where it removed nothing
    _sum: Weighed | None = None
    _portraits: Mapping[Any, Any] = field(default_factory=dict)
    _groups: set[str] = field(default_factory=set)
    _launched: int = 0
    _first: list[Step] = field(default_factory=list)
    _last: deque[Step] = field(default_factory=lambda: deque(maxlen=ENDS))

    def __post_init__(self) -> None:
        self.outliers = Outliers(tv_limit(self.contract))

    @cached_property
    def values(self) -> dict[str, set[str]]:
        """Of labels: what slices ask for."""
        cuts = cuts_of(self.contract.slices, _corpus(self.path, {}, ""))
        return label_values(cut for named in cuts.values() for cut in named)

    def plan(self, digest: str = "") -> Plan:
        """The plan: cells that were fixed before any logprob was looked at."""
        corpus = _corpus(self.path, self.kinds, digest)
        return planning.make_plan(self.contract, {WORKLOAD: corpus}, None)

    def meet(self, pair: TracePair) -> None:
        """Know the labels of a part of the head: cells are of labels that are there."""
        for kind in kinds_of(pair, self.values):
            self.kinds.setdefault(kind, len(self.kinds))

    def add(self, block: Rollouts) -> None:
        """Weigh one block.

        Raises:
            EvidenceError: shapes within the block differ.
        """
        pair = paired(block, self.sequences)
        kinds = kinds_of(pair, self.values)
        rows = [self.kinds.setdefault(kind, len(self.kinds)) for kind in kinds]
        if self._plan is None or len(self._plan.corpora[WORKLOAD]) < len(self.kinds):
            # labels that the head did not have lie in no slice of their own: same cells
            cells = self._plan.cells if self._plan else None
            plan = self.plan()
            self._plan = replace(plan, cells=cells) if cells else plan
        groups = {g: i for i, g in enumerate(dict.fromkeys(pair.group_S))}
        units = tuple(
            Unit(int(s), row, groups[g])
            for s, row, g in zip(pair.infer.sequence_S, rows, pair.group_S, strict=True)
        )
        found = weigh(self._plan, EMPTY, [Round(WORKLOAD, 0, units, pair)])
        weighed = everything = _of_record(found)
        drawn = pair
        if (removed_N := block.removed_N) is not None:
            drawn = paired(block, self.sequences, filtered=False)
            both = weigh(self._plan, EMPTY, [Round(WORKLOAD, 0, units, drawn)])
            everything = _of_record(both)
            own, every = (p.portraits[WORKLOAD, "infer"].total for p in (found, both))
            self.filter.add(block, removed_N, own, every)
        if removed_N is not None or self._before is not None:
            self._before = _plus(self._before or self._sum, everything)
        self._sum = _plus(self._sum, weighed)
        merged = Evidence(EMPTY, "", portraits=self._portraits) + Evidence(
            EMPTY, "", portraits=found.portraits
        )
        self._portraits = merged.portraits
        self._by_step(block, pair, weighed, None if removed_N is None else everything)
        self.step_sums += found.portraits[WORKLOAD, "infer"].total
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
            self.steps[block.step] = step = Step(block.step)
            self._groups = set()
            self.step_sums, self.step_atoms = Sums(), {}
            self.step_weighed = self.step_drawn = None
            if len(self._first) < ENDS:
                self._first.append(step)
            else:
                if len(self._last) == ENDS:
                    self._last[0].groups.clear()  # only both ends of a dump keep their groups
                    self._last[0].drift.clear()
                self._last.append(step)
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
        group_N = np.repeat(np.array(_ids(pair.group_S)), length_S)
        sum_G = np.bincount(group_N[usable_N], np.abs(log_ratio_N[usable_N]))
        n_G = np.bincount(group_N[usable_N])
        for name, total, n in zip(dict.fromkeys(pair.group_S), sum_G, n_G, strict=False):
            had = step.groups.get(name, GroupSums())
            step.groups[name] = had + GroupSums(float(total), int(n))

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
        """Every slice but the whole, in the order of the plan."""
        assert self._plan is not None
        named = (c.cut for c in self._plan.cells if c.cut.name != WHOLE)
        cuts = tuple(dict.fromkeys(named))
        assert len(cuts) <= _BITS  # a dump gets 40 slices at most
        return cuts

    @property
    def ends(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The first and the last ENDS steps, without overlap; short where there are fewer."""
        return tuple(self._first), tuple(self._last)

    def before_filter(self, evidence: Evidence) -> Evidence | None:
        """The evidence with the tokens that a filter removed; None where it removed none."""
        if self._before is None:
            return None
        whole = replace(self._before, groups=self._launched)
        return replace(evidence, rounds={(WORKLOAD, 0): whole})

    @property
    def removed(self) -> Removed | None:
        """What a filter of the trainer removed."""
        total = self._portraits[WORKLOAD, "infer"].total
        return self.filter.removed(self.sequences, self.trained, total)

    def of_step(self) -> tuple[Plan, Evidence, Evidence | None]:
        """What the last step holds by itself, and the same with what a filter removed of it."""
        plan, groups = self._plan, len(self._groups)
        assert plan is not None and self.step_weighed is not None
        kept, drawn = (
            of and Evidence(EMPTY, plan.digest, {(WORKLOAD, 0): replace(of, groups=groups)})
            for of in (self.step_weighed, self.step_drawn)
        )
        assert kept is not None
        return plan, kept, drawn

    @property
    def agreement(self) -> Agreement:
        """Whether the two columns could have disagreed, and did."""
        return Agreement() if self._sum is None else self._sum.agreement

    def evidence(self) -> tuple[Plan, Evidence]:
        """All of it, keyed by what was read."""
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
            weights=f"{min(steps)}..{max(steps)}",  # evidence names the steps that it speaks of
            grade="declared",
        )
        whole = replace(self._sum, groups=self._launched)
        return plan, Evidence(
            key, plan.digest, {(WORKLOAD, 0): whole}, portraits=dict(self._portraits)
        )


EMPTY = EvidenceKey("", "", "external", "external", "", grade="declared")


def kinds_of(pair: TracePair, values: Mapping[str, Collection[str]]) -> list[Kind]:
    """The labels of each sequence, of those values that a slice asks for.

    Args:
        values: name of a label -> the values that are asked for.
    """
    names = [name for name in sorted(pair.labels) if name in values]
    if not names:
        return [()] * len(pair.infer.sequence_S)
    columns = zip(*(pair.labels[name] for name in names), strict=True)
    return [
        tuple((n, v) for n, v in zip(names, row, strict=True) if v in values[n]) for row in columns
    ]


def label_values(cuts: Iterable[Cut]) -> dict[str, set[str]]:
    """Which values of which labels slices ask for."""
    found: dict[str, set[str]] = {}
    for term in (term for cut in cuts for term in cut.terms if term.field.startswith(LABEL)):
        found.setdefault(term.field.removeprefix(LABEL), set()).update(term.value)
    return found


def masks_of(cuts: Iterable[Cut], pair: TracePair) -> dict[Cut, Array]:
    """Which trained tokens lie in each slice, [N]."""
    cuts = [*cuts]
    prompts = [Prompt(0, labels=dict(kind)) for kind in kinds_of(pair, label_values(cuts))]
    found = columns(pair, prompts, {field for cut in cuts for field in cut.fields})
    return {cut: cut.mask(found, len(pair.infer.token_N)) for cut in cuts}


def _corpus(path: str, kinds: Mapping[Kind, int], digest: str) -> Corpus:
    """A dump's sequences as lines that slices can be asked of: one line a kind of labels."""
    prompts = tuple(Prompt(row + 1, labels=dict(kind)) for kind, row in kinds.items())
    return Corpus(path, prompts or (Prompt(1),), digest)


def _ids(names: Sequence[str]) -> list[int]:
    ids = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [ids[name] for name in names]


def added(mine: Weighed, other: Weighed) -> Weighed:
    """Two rounds of a realised claim as one."""
    return Weighed(
        tuple(_sum_of(a, b) for a, b in zip(mine.statistics, other.statistics, strict=True)),
        mine.noise,
        sequences=mine.sequences + other.sequences,
        tokens=mine.tokens + other.tokens,
        lost=mine.lost + other.lost,
        groups=mine.groups + other.groups,
        agreement=mine.agreement + other.agreement,
    )


def _of_record(found: Evidence) -> Weighed:
    """What a block says; of a dump, no token that would come next is counted as missing."""
    return replace(found.rounds[WORKLOAD, 0], unended=0)


def _plus(mine: Weighed | None, other: Weighed) -> Weighed:
    return other if mine is None else added(mine, other)


def _sum_of(mine: Any, other: Any) -> Any:
    return None if mine is None else mine + other
