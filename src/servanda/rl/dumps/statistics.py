# The statistics of a dump: parts of its steps, added up in their order.
#
# A realised claim concerns all tokens together, so its statistics are additive and one sum is kept.
# Further sums are for the report: means by step, and by combination of slices.  Memory does not
# grow with the number of tokens.

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Contract
from servanda.judgement import plan as planning
from servanda.judgement.breakdown import Removed
from servanda.judgement.evidence import Evidence, Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import LABEL, Cut, cuts_of
from servanda.judgement.token_profile import Portrait
from servanda.rl.dumps.outliers import Outliers, RemovedTokens, tv_limit
from servanda.rl.dumps.step_part import Measures, StepPart, StepSummation
from servanda.rl.steps.contract import WORKLOAD, Labels, corpus_of
from servanda.rl.steps.drift import RunEnds, StepDrift
from servanda.rl.trend.changes import StepScalars
from servanda.theory.stats.agreement import Agreement
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair


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
