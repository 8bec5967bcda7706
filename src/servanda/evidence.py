# Evidence: closed rounds turned into statistics that add up.
#
# A round counts only whole, and only while every round before it is there: evidence is a
# closed prefix, so that nothing about an outcome decides what is included (law 5).

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.clauses import View
from servanda.corpus import Corpus
from servanda.errors import EvidenceError
from servanda.identity import EvidenceKey
from servanda.plan import Plan, Unit
from servanda.sampling import uniforms
from servanda.slices import FIELDS, LABEL, column
from servanda.trace import TracePair

Array = NDArray[Any]


@dataclass(frozen=True)
class Round:
    """One closed round as it was measured.

    Args:
        units: the launched sequences, in launch order.
        pair: both kernels on the drawn tokens.
        self_train, self_infer: a tenth of them, each side against itself re-batched.
    """

    index: int
    units: tuple[Unit, ...]
    pair: TracePair
    self_train: TracePair | None = None
    self_infer: TracePair | None = None


@dataclass(frozen=True)
class GoldenRun:
    """Both kernels on the golden texts; the joint columns hold the exact metrics."""

    rows: tuple[int, ...]
    pair: TracePair
    exact: Mapping[str, Array]
    self_rows: tuple[int, ...] = ()
    self_pairs: tuple[TracePair, ...] = ()
    self_exact: tuple[Mapping[str, Array], ...] = ()


@dataclass(frozen=True)
class Weighed:
    """Statistics of one closed round: one entry a cell, and what was counted."""

    statistics: tuple[Any, ...]
    noise: tuple[Any, ...]
    sequences: int = 0
    tokens: int = 0
    lost: int = 0
    groups: int = 0


@dataclass(frozen=True)
class Evidence:
    """Everything a verdict is judged from; `+` merges disjoint shards and refuses overlap."""

    key: EvidenceKey
    plan: str
    rounds: Mapping[int, Weighed] = field(default_factory=dict)
    golden: Weighed | None = None

    def __add__(self, other: Evidence) -> Evidence:
        if (self.key, self.plan) != (other.key, other.plan):
            what = self.key.differences(other.key) or ["the plan"]
            raise EvidenceError(
                f"evidence of two keys cannot be merged: {', '.join(what)} changed",
                hint="measure again, or judge each by itself",
            )
        shared = sorted(self.rounds.keys() & other.rounds.keys())
        if shared:
            raise EvidenceError(
                f"round {shared[0]} is in both shards ({len(shared)} such): merged twice it "
                "would count twice",
                hint="give each shard its own rounds",
            )
        return Evidence(
            self.key,
            self.plan,
            {**self.rounds, **other.rounds},
            self.golden if self.golden is not None else other.golden,
        )

    @cached_property
    def closed(self) -> tuple[Weighed, ...]:
        """The rounds 0, 1, ... up to the first that is missing."""
        prefix = []
        while len(prefix) in self.rounds:
            prefix.append(self.rounds[len(prefix)])
        return tuple(prefix)

    @property
    def launched(self) -> int:
        """Prompt groups of the closed rounds."""
        return sum(r.groups for r in self.closed)

    @property
    def digest(self) -> str:
        """Of every number in it; independent of the order in which shards were merged."""
        text = repr((self.key, self.plan, sorted(self.rounds.items()), self.golden))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def weigh(plan: Plan, key: EvidenceKey, rounds: Iterable[Round]) -> Evidence:
    """Closed rounds to evidence; pure, so that shards may be weighed anywhere."""
    return Evidence(key, plan.digest, {r.index: _weigh_round(plan, r) for r in rounds})


def weigh_golden(plan: Plan, key: EvidenceKey, run: GoldenRun) -> Evidence:
    """The golden texts to evidence."""
    assert plan.golden is not None
    view = _golden_view(plan.golden, run.rows, run.pair, run.exact)
    self_views = [
        _golden_view(plan.golden, run.self_rows, pair, exact)
        for pair, exact in zip(run.self_pairs, run.self_exact, strict=True)
    ]
    cells = [c if c.kind.source == "golden" else None for c in plan.cells]
    weighed = Weighed(
        tuple(c and c.kind.weigh(c, view) for c in cells),
        tuple(c and tuple(c.kind.noise(c, v) for v in self_views) for c in cells),
        sequences=len(run.rows),
        tokens=len(run.pair.infer.token_N),
    )
    return Evidence(key, plan.digest, {}, weighed)


def _weigh_round(plan: Plan, measured: Round) -> Weighed:
    view = round_view(plan, measured.units, measured.pair)
    by_sequence = {u.sequence: u for u in measured.units}
    self_views = [
        round_view(plan, tuple(by_sequence[int(s)] for s in p.infer.sequence_S), p)
        for p in (measured.self_train, measured.self_infer)
        if p is not None
    ]
    cells = [c if c.kind.source == "workload" else None for c in plan.cells]
    return Weighed(
        tuple(c and c.kind.weigh(c, view) for c in cells),
        tuple(c and tuple(c.kind.noise(c, v) for v in self_views) for c in cells),
        sequences=len(measured.units),
        tokens=len(measured.pair.infer.token_N),
        lost=int(measured.pair.infer.lost_S.sum()),
        groups=view.launched,
    )


def round_view(plan: Plan, units: tuple[Unit, ...], pair: TracePair) -> View:
    """A round's tokens with the columns that slices and guards ask for."""
    assert plan.corpus is not None
    trace = pair.infer
    length_S = trace.length_S
    first = min(u.group for u in units)
    group_S = np.array([u.group - first for u in units], dtype=np.int64)
    prompts = [plan.corpus.prompts[u.row] for u in units]
    tokens_S = trace.prompt_tokens_S.tolist()
    cuts = {cell.cut for cell in plan.cells}
    may_meet = {
        cut: np.array(
            [cut.may_meet(p, n) for p, n in zip(prompts, tokens_S, strict=True)], dtype=bool
        )
        for cut in cuts
    }
    uniform_N = [
        uniforms(plan.seed, "pit", u.sequence, int(n)) for u, n in zip(units, length_S, strict=True)
    ]
    return View(
        pair=pair,
        columns=_columns(pair, prompts, {f for cut in cuts for f in cut.fields}),
        group_N=np.repeat(group_S, length_S),
        group_S=group_S,
        launched=len({u.group for u in units}),
        width=plan.width,
        may_meet=may_meet,
        uniform_N=np.concatenate(uniform_N) if uniform_N else np.zeros(0),
    )


def _golden_view(
    golden: Corpus, rows: tuple[int, ...], pair: TracePair, exact: Mapping[str, Array]
) -> View:
    prompts = [golden.prompts[r] for r in rows]
    fields = {*FIELDS} | {f"{LABEL}{label}" for p in golden.prompts for label in p.labels}
    n = len(pair.infer.token_N)
    return View(
        pair=pair,
        columns=_Absent(_columns(pair, prompts, fields), n),
        group_N=np.zeros(n, dtype=np.int64),
        group_S=np.zeros(len(rows), dtype=np.int64),
        launched=0,
        width=0,
        exact=exact,
    )


class _Absent(dict[str, Array]):
    """Columns in which a label that no golden text has reads as absent."""

    def __init__(self, columns: Mapping[str, Array], n: int) -> None:
        super().__init__(columns)
        self._n = n

    def __missing__(self, field: str) -> Array:
        return np.full(self._n, None, dtype=object)


def _columns(pair: TracePair, prompts: list[Any], fields: set[str]) -> dict[str, Array]:
    trace = pair.infer
    columns: dict[str, Array] = {}
    for name in fields:
        if name == "context.position":
            columns[name] = pair.position_N.astype(np.float64)
        elif name in FIELDS and FIELDS[name].known != "request":
            columns[name] = column(name, trace.columns, len(trace.token_N))
        elif name == "request.prompt_tokens":
            columns[name] = np.repeat(trace.prompt_tokens_S, trace.length_S).astype(np.float64)
        else:
            label_S = np.array(
                [p.labels.get(name.removeprefix(LABEL)) for p in prompts], dtype=object
            )
            columns[name] = np.repeat(label_S, trace.length_S)
    return columns
