# What a clause is to the rest of the house: how a cell is weighed, and how it is judged.
#
# A cell is one clause on one slice.  A kind of clause is one class in one file: it turns a
# closed round into statistics that add up, and the sum into one of the answers.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import Claim, Clause, Place, Section
from servanda.errors import Where
from servanda.judgement.slices.rules import Cut
from servanda.registry import Registry
from servanda.theory.divergence.base import sampled
from servanda.traces.trace import TracePair

Array = NDArray[Any]
Outcome = Literal["violated", "error", "inconclusive", "holds", "not applicable"]
Source = Literal["workload", "golden", "timing", "batches", "corners", "coverage", "none"]
Statistic = Any  # LogMoment, GroupRatio, Fidelity, Values, Counts: frozen, added with +

SELVES = ("self_train", "self_infer")  # the peers that hold a side against itself
DRAWS = "train_draws"  # the peer that holds what train drew for the same units
REWARD = "reward"  # the column of a trace: of the whole answer, at each of its tokens
WITHIN_NOISE = (
    "beyond the limit, yet within twice the noise floor (an estimate): the kernels' own noise "
    "is as large"
)

# one total order everywhere; what is not applicable never counts (law 2)
ORDER: tuple[Outcome, ...] = ("violated", "error", "inconclusive", "holds")


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of many: violated > error > inconclusive > holds; none is inconclusive."""
    for outcome in ORDER:
        if outcome in outcomes:
            return outcome
    return "inconclusive"


def peak(rounds: Sequence[Array], claim: Claim = "population") -> float:
    """The most evidence that any closed prefix of rounds held, nats.

    Args:
        rounds: log e-values of the mixture's components, one array a round; they add up.
        claim: realised: it concerns what was measured so far, so what was red may be so no
            more, and all rounds count together.

    Ville's inequality covers all prefixes at once, so a fixed truth that was refuted once
    stays refuted.
    """
    if not rounds:
        return 0.0
    grown = np.cumsum(rounds, axis=0)
    grown = grown[-1:] if claim == "realised" else grown
    top = grown.max(axis=1)
    return float((top + np.log(np.exp(grown - top[:, None]).mean(axis=1))).max())


@dataclass(frozen=True)
class View:
    """A closed round, or a batch of golden texts, as the clauses see it.

    Args:
        columns: field -> value at each token, [N], for the terms of slices.
        group_N, group_S: prompt group of each token and sequence, 0-based in this view.
        launched: prompt groups of this view.
        width: new tokens that each sequence had room for.
        may_meet: cut -> [S], whether a sequence can fall into it at all.
        uniform_N: a fresh uniform for each token (for the PIT).
        exact: metric -> [N], joint columns, where both sides' logits were in memory.
        peers: what these numbers are compared with: "self_train" and "self_infer", a tenth
            of the sequences on each side against itself; "stable", the stable kernel on
            the same prompts; "train_draws", train's own answers to them, on both sides.
        itself: whether both sides are one kernel, in other batches.
    """

    pair: TracePair
    columns: Mapping[str, Array]
    group_N: Array
    group_S: Array
    launched: int
    width: int
    may_meet: Mapping[Cut, Array] = field(default_factory=dict)
    uniform_N: Array | None = None
    exact: Mapping[str, Array] = field(default_factory=dict)
    peers: Mapping[str, View] = field(default_factory=dict)
    itself: bool = False

    @cached_property
    def usable_N(self) -> Array:
        return self.pair.usable_N

    @cached_property
    def _cache(self) -> dict[tuple[str, object], Array]:
        return {}  # masks and metrics are shared by all cells of the round

    def mask(self, cut: Cut, *, unknown: bool = False) -> Array:
        """Tokens in a slice, [N]; `unknown` is what a context that was not recorded counts as."""
        key = (f"mask {unknown}", cut)
        if key not in self._cache:
            self._cache[key] = cut.mask(self.columns, len(self.usable_N), unknown=unknown)
        return self._cache[key]

    def inside(self, cut: Cut) -> Array:
        """1 where a token lies in the slice, 0 where it does not, NaN where no one knows; [N]."""
        inside_N = self.mask(cut)
        unknown_N = self.mask(cut, unknown=True) & ~inside_N & self.mask(cut.given)
        return np.where(unknown_N, np.nan, inside_N.astype(np.float64))

    def values(self, metric: str) -> Array:
        """The metric at each token, [N]; NaN where the token is unusable."""
        key = ("metric", metric)
        if key not in self._cache:
            train, infer, usable_N = self.pair.train.columns, self.pair.infer.columns, self.usable_N
            columns = {f"{c}_train": train[c][usable_N] for c in ("logp", "top1") if c in train}
            columns |= {f"{c}_infer": infer[c][usable_N] for c in ("logp", "top1") if c in infer}
            values_N = np.full(len(usable_N), np.nan)
            values_N[usable_N] = sampled(metric, columns)
            self._cache[key] = values_N
        return self._cache[key]

    def log_ratio(self) -> Array:
        """log p - log q of each token, [N], nats; NaN where it is unusable."""
        key = ("log_ratio", "")
        if key not in self._cache:
            train_N, infer_N = (s.columns["logp"] for s in (self.pair.train, self.pair.infer))
            with np.errstate(invalid="ignore"):
                self._cache[key] = np.where(self.usable_N, train_N - infer_N, np.nan)
        return self._cache[key]

    def over_sequences(self, values_N: Array) -> Array:
        """The sum over each launched sequence, [S]; NaN where any of its tokens has no value."""
        infer = self.pair.infer
        n = len(infer.length_S)
        sum_S: Array = np.bincount(np.repeat(np.arange(n), infer.length_S), values_N, minlength=n)
        return np.where(infer.length_S > 0, sum_S, np.nan)

    def lost(self, cut: Cut) -> Array:
        """Rows of launched sequences that yielded nothing and may belong to the slice."""
        return np.flatnonzero(self.pair.infer.lost_S & self.may_meet[cut])


@dataclass(frozen=True)
class Cell:
    """One clause on one slice, as the plan fixed it."""

    clause: Clause
    section: Section
    place: Place  # of the clause in the contract
    cut: Cut
    claim: Claim
    capacity: int  # most tokens that one prompt group can have in the slice
    kind: Kind
    workload: str = ""  # whose rounds are weighed; "" where none are

    @property
    def name(self) -> str:
        return f"{self.clause.id}[{self.cut.name}]"

    @property
    def units(self) -> str:
        """What is counted of tokens: they, or the prompt groups of a population."""
        return self.units_of("token")

    def units_of(self, each: str) -> str:
        """What is counted of tokens or sequences."""
        return f"{each}s" if self.claim == "realised" else "prompt groups"

    @property
    def priced(self) -> bool:
        """Whether the cell shares in alpha: it is enforced, and statistics may call it red."""
        return self.clause.enforced and self.kind.counts


@dataclass(frozen=True)
class Interim:
    """What a judgement at one look needs to know of the plan: prices and sizes."""

    alpha: float
    cells: int  # enforced cells: the price of a violation is cells / (alpha part)
    first: int  # prompt groups before which nothing holds
    launched: int  # prompt groups so far
    intervals: bool = True  # computing them is dear; a look that only decides leaves them out
    part: float = 1.0  # of alpha that violations may spend here, see course.Leg

    @property
    def log_price_holds(self) -> float:
        return math.log(1 / self.alpha)

    @property
    def alpha_violated(self) -> float:
        """What one cell may spend on this leg on calling a kept promise violated."""
        return self.alpha * self.part / max(self.cells, 1)

    @property
    def log_price_violated(self) -> float:
        return math.log(1 / self.alpha_violated)


@dataclass(frozen=True)
class CellVerdict:
    """The answer for one cell, with everything that a number must carry (law 3).

    Args:
        kind: certificate, conditional bound (a certificate times what the contract declares),
            fact, estimate, guard, or "" where nothing was computed.
        value, interval, limit, floor: in the clause's own terms: the mean of the metric, or
            for a percentile clause the share of tokens beyond at_most.
        n, units: what was counted, and of what; missing: units or tokens without a value.
        e_holds, e_violated: log evidence, nats, against what `holds` and `violated` cost.
        share: of the workload's tokens that lie in the slice.
        stable: the stable kernel's value, an estimate from the same prompts.
        more: prompt groups that would decide, as a projection.
        assumptions: names of bounds.ASSUMPTIONS that the number rests on.
        where: the clause in the contract's text.
    """

    clause: str
    section: Section
    metric: str
    aggregate: str
    slice: str
    outcome: Outcome
    kind: str = ""
    claim: str = ""
    severity: str = "error"
    enforced: bool = True
    unit: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    limit: float | None = None
    floor: float | None = None
    stable: float | None = None
    share: float | None = None
    workload: str = ""
    n: int = 0
    units: str = ""
    missing: int = 0
    alpha: float | None = None
    e_holds: float | None = None
    e_violated: float | None = None
    threshold: float | None = None  # of a percentile clause, in units of the metric
    more: int | None = None
    open: bool = False  # more rounds of this run could change the outcome
    note: str = ""
    assumptions: tuple[str, ...] = ()
    where: Where | None = field(default=None, compare=False)

    def but(self, **changes: Any) -> CellVerdict:
        return replace(self, **changes)


def limit_of(clause: Clause) -> float:
    """The limit of a clause that lint accepts a number for alone."""
    limit = clause.at_most if clause.at_least is None else clause.at_least
    assert isinstance(limit, float)
    return limit


def blank(cell: Cell, outcome: Outcome, note: str = "", **more: Any) -> CellVerdict:
    """A cell's verdict with its names filled in."""
    return CellVerdict(
        clause=cell.clause.id,
        section=cell.section,
        metric=cell.clause.metric,
        aggregate=cell.clause.aggregate or "",
        slice=cell.cut.name,
        outcome=outcome,
        claim=cell.claim,
        workload=cell.workload,
        severity=cell.clause.severity,
        enforced=cell.clause.enforced,
        note=note,
        **more,
    )


class Kind:
    """A kind of clause; each has a `judge` of its own, and those that need evidence a `weigh`.

    `counts`: whether its cells can be violated, and so share in alpha.
    `source`: what is weighed: the workload's rounds, the golden texts (a View of either),
    timed requests, batches, corners of the envelope, what was served, or nothing.
    `peers`: names of `View.peers` without which it cannot be judged.
    `noise`: of a peer of the view, for reports; `floor`: the larger side's noise floor from
    all parts, each (train, infer); None where nothing was measured.
    `unexamined`: what it was too weak to see, one sentence each.
    """

    counts: ClassVar[bool] = False
    source: ClassVar[Source] = "workload"
    peers: ClassVar[tuple[str, ...]] = ()

    def weigh(self, cell: Cell, view: Any, /) -> Statistic:
        """The statistic of what was measured; None of a kind that needs none."""
        return None

    def noise(self, cell: Cell, view: Any, /) -> Any:
        return None

    def floor(self, cell: Cell, parts: list[Any], /) -> float | None:
        return None

    def judge(
        self, cell: Cell, rounds: list[Statistic], floor: float | None, look: Interim, /
    ) -> CellVerdict:
        raise NotImplementedError

    def unexamined(self, cell: Cell, rounds: list[Statistic], look: Interim, /) -> tuple[str, ...]:
        return ()


class Sampled(Kind):
    """Kinds whose numbers come from sampled tokens: where a guard fails, they say nothing."""


GUARDS: Registry[type[Kind]] = Registry("guard")
