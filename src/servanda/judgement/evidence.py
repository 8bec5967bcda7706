# Evidence: additive statistics of closed rounds.
#
# A round counts only if it is complete and all earlier rounds exist: evidence is a closed prefix,
# so that no outcome decides its inclusion (law 5).

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import EvidenceKey
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import DRAWS, FORMAT, SELVES, Cell, Source, View
from servanda.judgement.schedule import Schedule, Unit
from servanda.judgement.slices.atoms import SliceCodes
from servanda.judgement.slices.columns import columns
from servanda.judgement.slices.rules import FIELDS, LABEL
from servanda.judgement.token_profile import Portrait, added, portray
from servanda.theory.sampling import uniforms
from servanda.theory.stats.agreement import Agreement
from servanda.traces.corpus import Corpus
from servanda.traces.trace import TracePair, unended

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

Array = NDArray[Any]
# measurements other than rounds (timed requests, batches, corners of the envelope): source -> data
# for its kinds of clauses
Once = Mapping[Source, Any]


@dataclass(frozen=True)
class Round:
    """One closed round of a workload as it was measured.

    Args:
        workload: its name.
        units: the dispatched sequences, in dispatch order.
        pair: both kernels on the sampled tokens.
        peers: data for comparison: "self_train", "self_infer": 10 % of the sequences, each side
            compared with itself re-batched; "stable": the stable kernel and train on the stable
            kernel's samples for the same units; "train_draws": train's own responses, on both sides
            of the pair.
    """

    workload: str
    index: int
    units: tuple[Unit, ...]
    pair: TracePair
    peers: Mapping[str, TracePair] = field(default_factory=dict)


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
    """Statistics of one closed round, or of the golden texts: one entry per cell, and counts.

    Args:
        noise: per cell, (train, infer), each side compared with itself.
        stable: per cell, the statistics of the stable kernel.
        agreement: whether the two sides could have disagreed; not part of the digest.
        unended: responses whose last token has no logprob.
    """

    statistics: tuple[Any, ...]
    noise: tuple[Any, ...]
    stable: tuple[Any, ...] = ()
    sequences: int = 0
    tokens: int = 0
    lost: int = 0
    groups: int = 0
    agreement: Agreement = field(default=Agreement(), repr=False, compare=False)
    unended: int = field(default=0, repr=False, compare=False)

    def __add__(self, other: Weighed) -> Weighed:
        """Two rounds of a realised claim, without a stable kernel, as one."""
        pairs = zip(self.statistics, other.statistics, strict=True)
        names = ("sequences", "tokens", "lost", "groups", "agreement", "unended")
        return replace(
            self,
            statistics=tuple(None if own is None else own + more for own, more in pairs),
            **{name: getattr(self, name) + getattr(other, name) for name in names},
        )


@dataclass(frozen=True)
class Evidence:
    """The data of a verdict; `+` merges disjoint shards and refuses overlap.

    Args:
        rounds: (workload, index) -> closed round.
        once: single measurements, by source: "golden", "timing".
        portraits: (workload, "infer" or a peer) or ("", "golden") -> token profile of all rounds;
            descriptive, not part of the digest.
    """

    key: EvidenceKey
    plan: str
    rounds: Mapping[tuple[str, int], Weighed] = field(default_factory=dict)
    once: Mapping[str, Weighed] = field(default_factory=dict)
    portraits: Mapping[tuple[str, str], Portrait] = field(default_factory=dict, compare=False)

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
                f"round {shared[0][1]} of {shared[0][0]!r} is in both shards ({len(shared)} "
                "such): merged twice it would count twice",
                hint="give each shard its own rounds",
            )
        return Evidence(
            self.key,
            self.plan,
            {**self.rounds, **other.rounds},
            {**other.once, **self.once},
            added(self.portraits, other.portraits),
        )

    def closed(self, workload: str) -> tuple[Weighed, ...]:
        """A workload's rounds 0, 1, ... up to the first that is missing."""
        prefix: list[Weighed] = []
        while (workload, len(prefix)) in self.rounds:
            prefix.append(self.rounds[workload, len(prefix)])
        return tuple(prefix)

    @property
    def digested(self) -> str:
        """Every number with its class and field names, which stored digests fix."""
        return repr((self.key, self.plan, sorted(self.rounds.items()), sorted(self.once.items())))

    @property
    def digest(self) -> str:
        """The digest over every number; independent of the order of merging."""
        return hashlib.blake2b(self.digested.encode(), digest_size=16).hexdigest()


def weigh(plan: Plan, key: EvidenceKey, rounds: Iterable[Round]) -> Evidence:
    """Compute evidence from closed rounds; pure, so that shards can be computed anywhere."""
    weighed: dict[tuple[str, int], Weighed] = {}
    portraits: dict[tuple[str, str], Portrait] = {}
    for r in rounds:
        weighed[r.workload, r.index], profiles = _weigh_round(plan, r)
        portraits = added(portraits, {(r.workload, name): p for name, p in profiles.items()})
    return Evidence(key, plan.digest, weighed, {}, portraits)


def weigh_golden(plan: Plan, key: EvidenceKey, run: GoldenRun) -> Evidence:
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
        agreement=agreement_of(run.pair),
    )
    portraits = {
        ("", "golden"): portray(run.pair, SliceCodes.of({}, len(run.pair.infer.token_N)), run.rows)
    }
    return Evidence(key, plan.digest, {}, {"golden": weighed}, portraits)


def _weigh_round(plan: Plan, measured: Round) -> tuple[Weighed, dict[str, Portrait]]:
    schedule = next(s for s in plan.schedules if s.name == measured.workload)
    mine = [c if c.workload == measured.workload else None for c in plan.cells]
    cells = [c for c in mine if c is not None]
    unit_of = {u.sequence: u for u in measured.units}

    def view(pair: TracePair) -> View:
        units = tuple(unit_of[int(s)] for s in pair.infer.sequence_S)
        return round_view(schedule, cells, units, pair)

    peers = {
        name: replace(view(pair), itself=name in SELVES) for name, pair in measured.peers.items()
    }
    own = replace(view(measured.pair), peers=peers)
    selves = [peers[name] for name in SELVES if name in peers]
    stable = peers.get("stable")
    weighed = Weighed(
        tuple(c and c.kind.weigh(c, own) for c in mine),
        tuple(c and tuple(c.kind.noise(c, v) for v in selves) for c in mine),
        tuple(c and c.kind.noise(c, stable) for c in mine) if stable else (),
        sequences=len(measured.units),
        tokens=len(measured.pair.infer.token_N),
        lost=int(measured.pair.infer.lost_S.sum()),
        groups=own.launched,
        agreement=agreement_of(measured.pair),
        unended=unended(measured.pair.infer),
    )
    # responses used only for rewards have no second side for a token profile
    beside = (DRAWS, FORMAT)
    views = {"infer": own, **{name: v for name, v in peers.items() if name not in beside}}
    return weighed, {name: _portrait(v, measured, cells) for name, v in views.items()}


def cut_answers(rounds: Sequence[Weighed]) -> str:
    """A sentence about responses that stop without an end token; "" if none."""
    if not (cut := sum(r.unended for r in rounds)):
        return ""
    return (
        f"{cut:,} of {sum(r.sequences for r in rounds):,} answers stop early, at no end token "
        "with a logprob (cut, aborted, or the engine does not report it): the token that would "
        "come next is counted as missing, what follows it is not known"
    )


def agreement_of(pair: TracePair) -> Agreement:
    """The agreement over all tokens of a pair."""
    train, infer = pair.train.columns["logp"], pair.infer.columns["logp"]
    return Agreement.of(train, infer, pair.infer.length_S)


def _portrait(view: View, measured: Round, cells: list[Cell]) -> Portrait:
    position = {u.sequence: i for i, u in enumerate(measured.units)}
    at = [position[int(s)] for s in view.pair.infer.sequence_S]
    return portray(
        view.pair,
        SliceCodes.of(
            {cell.cut.name: view.mask(cell.cut) for cell in cells}, len(view.pair.infer.token_N)
        ),
        [measured.units[i].row for i in at],
    )


def round_view(
    schedule: Schedule, cells: Sequence[Cell], units: tuple[Unit, ...], pair: TracePair
) -> View:
    """A round's tokens with the columns for slices and validity checks."""
    trace = pair.infer
    length_S = trace.length_S
    _, group_S = np.unique([u.group for u in units], return_inverse=True)
    prompts = [schedule.corpus.prompts[u.row] for u in units]
    tokens_S = trace.prompt_tokens_S.tolist()
    cuts = {cut for cell in cells for cut in (cell.cut, cell.cut.given)}
    may_meet = {
        cut: np.array(
            [cut.may_meet(p, n) for p, n in zip(prompts, tokens_S, strict=True)], dtype=bool
        )
        for cut in cuts
    }
    uniform_N = [
        uniforms(schedule.seed, "pit", u.sequence, int(n))
        for u, n in zip(units, length_S, strict=True)
    ]
    return View(
        pair=pair,
        columns=columns(pair, prompts, {f for cut in cuts for f in cut.fields}),
        group_N=np.repeat(group_S, length_S),
        group_S=group_S,
        launched=int(group_S.max()) + 1 if len(group_S) else 0,
        width=schedule.width,
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
        columns=_Absent(columns(pair, prompts, fields), n),
        group_N=np.zeros(n, dtype=np.int64),
        group_S=np.zeros(len(rows), dtype=np.int64),
        launched=0,
        width=0,
        exact=exact,
    )


class _Absent(dict[str, Array]):
    """Columns in which fields that golden texts lack are absent."""

    def __init__(self, columns: Mapping[str, Array], n: int) -> None:
        super().__init__(columns)
        self._n = n

    def __missing__(self, field: str) -> Array:
        return np.full(self._n, None, dtype=object)


def weigh_once(plan: Plan, key: EvidenceKey, once: Once) -> Evidence:
    """Compute evidence from single measurements; pure."""
    weighed = {}
    for source, run in once.items():
        cells = [c if c.kind.source == source else None for c in plan.cells]
        weighed[source] = Weighed(
            tuple(c and c.kind.weigh(c, run) for c in cells),
            tuple(c and c.kind.noise(c, run) for c in cells),
        )
    return Evidence(key, plan.digest, once=weighed)
