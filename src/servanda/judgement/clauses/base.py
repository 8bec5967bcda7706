# The interface of clauses: the statistics of a cell, and its judgement.
#
# A cell is one clause on one slice.  A kind of clause is one class in one file: it turns a closed
# round into additive statistics, and their sum into an outcome.

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import WHOLE, Claim, Clause, Place, Section
from servanda.errors import Where
from servanda.judgement.slices.rules import Cut
from servanda.registry import Registry
from servanda.theory.bounds.theorem import Standing
from servanda.theory.divergence.base import DIVERGENCES, sampled
from servanda.theory.stats.alpha import log_price, shared
from servanda.traces.trace import TracePair

if TYPE_CHECKING:
    from servanda.contract.model import Contract
    from servanda.judgement.clauses.chain_metrics import Lack
    from servanda.judgement.clauses.numerical import Corner
    from servanda.judgement.clauses.service_level import LoadOf
    from servanda.judgement.clauses.statistical import Certificate

Array = NDArray[Any]
Outcome = Literal["violated", "error", "inconclusive", "holds", "not applicable"]
Source = Literal["workload", "golden", "timing", "batches", "corners", "coverage", "split", "none"]
# of tokens: log ratios, their lower ends after rounding, whether a filter removed them, the weights
# that the loss used; drafts; of responses: their own values, or how many are beyond some levels
Reads = Literal["", "ratio", "lower", "removed", "loss", "drafts", "responses", "tails"]
# named reasons of an outcome, on which other code may decide; the note has the words for people
Reason = Literal[
    "",
    "within noise",
    "train draws otherwise",
    "violated unfiltered",
    "undecided unfiltered",
    "format cost",
    "another set-up",
]
Statistic = Any  # LogMoment, GroupRatio, Fidelity, Values, Counts: frozen, added with +

SELVES = ("self_train", "self_infer")  # the peers that compare a side with itself
FORMAT = "format"  # the peer with infer's samples, scored by train in another format
DRAWS = "train_draws"  # the peer with train's own samples for the same units
REWARD = "reward"  # trace column: of the whole response, repeated at each of its tokens
FLOOR = "beyond twice the noise floor (a kernel's difference from itself in other batches)"
WITHIN_NOISE = (
    "beyond the limit, yet within twice the noise floor (an estimate): the kernels' own noise "
    "is as large"
)

# one total order everywhere; what is not applicable never counts (law 2)
ORDER: tuple[Outcome, ...] = ("violated", "error", "inconclusive", "holds")


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst outcome: violated > error > inconclusive > holds; inconclusive if empty."""
    for outcome in ORDER:
        if outcome in outcomes:
            return outcome
    return "inconclusive"


def peak(
    rounds: Sequence[Array], claim: Claim = "population", weight: Array | None = None
) -> float:
    """The largest log e-value over all closed prefixes of rounds, nats.

    Args:
        rounds: log e-values of the mixture's components, one array per round; additive.
        weight: of the components; None: equal.
        claim: realised: it concerns the tokens measured so far, so a violation may disappear, and
            only the total counts.

    Ville's inequality covers all prefixes at once, so a fixed truth that was refuted once
    stays refuted.
    """
    if not rounds:
        return 0.0
    grown = np.cumsum(rounds, axis=0)
    grown = grown[-1:] if claim == "realised" else grown
    top = grown.max(axis=1)
    part = np.exp(grown - top[:, None])
    mean = part.mean(axis=1) if weight is None else part @ weight
    return float((top + np.log(mean)).max())


@dataclass(frozen=True)
class View:
    """The data of a closed round, or a batch of golden texts, for clauses.

    Args:
        columns: field -> value at each token, [N], for the terms of slices.
        group_N, group_S: prompt group of each token and sequence, 0-based in this view.
        launched: number of dispatched prompt groups of this view.
        width: most new tokens of each sequence.
        may_meet: cut -> [S], whether a sequence can fall into it.
        uniform_N: a fresh uniform for each token (for the PIT).
        exact: metric -> [N], joint columns, if both sides' logits were in memory.
        peers: data for comparison: "self_train" and "self_infer", 10 % of the sequences on each
            side compared with itself; "stable", the stable kernel on the same prompts;
            "train_draws", train's own responses to them, on both sides.
        itself: whether both sides are one kernel in different batches.
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
    def sequence_N(self) -> Array:
        """Row of each token's sequence."""
        length_S = self.pair.infer.length_S
        return np.repeat(np.arange(len(length_S)), length_S)

    @cached_property
    def _cache(self) -> dict[tuple[str, object], Array]:
        return {}  # masks and metrics are shared by all cells of the round

    def mask(self, cut: Cut, *, unknown: bool = False) -> Array:
        """Tokens in a slice, [N]; `unknown` is the result for contexts that were not recorded."""
        key = (f"mask {unknown}", cut)
        if key not in self._cache:
            self._cache[key] = cut.mask(self.columns, len(self.usable_N), unknown=unknown)
        return self._cache[key]

    def inside(self, cut: Cut) -> Array:
        """1 for tokens in the slice, 0 for others, NaN if unknown; [N]."""
        inside_N = self.mask(cut)
        unknown_N = self.mask(cut, unknown=True) & ~inside_N & self.mask(cut.given)
        return np.where(unknown_N, np.nan, inside_N.astype(np.float64))

    def values(self, metric: str) -> Array:
        """The metric at each token, [N]; NaN for unusable tokens."""
        key = ("metric", metric)
        if key not in self._cache:
            form, usable_N = DIVERGENCES[metric].sampled_form, self.usable_N
            name = "logp" if form == "logprob" else str(form)
            sides = {"train": self.pair.train, "infer": self.pair.infer}
            columns = {f"{name}_{k}": t.recorded(name, k)[usable_N] for k, t in sides.items()}
            values_N = np.full(len(usable_N), np.nan)
            values_N[usable_N] = sampled(metric, columns)
            self._cache[key] = values_N
        return self._cache[key]

    def log_ratio(self) -> Array:
        """log p - log q of each token, [N], nats; NaN for unusable tokens."""
        key = ("log_ratio", "")
        if key not in self._cache:
            train_N, infer_N = (s.columns["logp"] for s in (self.pair.train, self.pair.infer))
            with np.errstate(invalid="ignore"):
                self._cache[key] = np.where(self.usable_N, train_N - infer_N, np.nan)
        return self._cache[key]

    def over_sequences(self, values_N: Array) -> Array:
        """The sum over each dispatched sequence, [S]; NaN if any token has no value."""
        length_S = self.pair.infer.length_S
        sum_S: Array = np.bincount(self.sequence_N, values_N, minlength=len(length_S))
        return np.where(length_S > 0, sum_S, np.nan)

    def lost(self, cut: Cut) -> Array:
        """Rows of lost sequences that may belong to the slice."""
        return np.flatnonzero(self.pair.infer.lost_S & self.may_meet[cut])


@dataclass(frozen=True)
class Cell:
    """One clause on one slice, as fixed by the plan."""

    clause: Clause
    section: Section
    place: Place  # of the clause in the contract
    cut: Cut
    claim: Claim
    capacity: int  # most tokens of one prompt group in the slice
    kind: Kind
    workload: str = ""  # workload of its rounds; "" without rounds

    @property
    def name(self) -> str:
        return f"{self.clause.id}[{self.cut.name}]"

    @property
    def units(self) -> str:
        """The unit: tokens, or prompt groups for a population."""
        return self.units_of("token")

    def units_of(self, each: str) -> str:
        """The unit of token or sequence data."""
        return f"{each}s" if self.claim == "realised" else "prompt groups"

    @property
    def priced(self) -> bool:
        """Whether the cell takes a share of alpha: enforced, with a statistical violation test."""
        return self.clause.enforced and self.kind.counts


@dataclass(frozen=True)
class Interim:
    """The parameters of one evaluation: thresholds and sizes."""

    alpha: float
    cells: int  # enforced cells: the e-value threshold of a violation is cells / (alpha part)
    first: int  # fewest prompt groups for `holds`
    launched: int  # prompt groups so far
    intervals: bool = True  # computing them is expensive; an evaluation for a decision omits them
    part: float = 1.0  # share of alpha for violations here, see course.Leg

    @property
    def log_price_holds(self) -> float:
        return log_price(self.alpha)

    @property
    def alpha_violated(self) -> float:
        """The error probability of a false violation of one cell on this step."""
        return shared(self.alpha * self.part, self.cells)

    @property
    def log_price_violated(self) -> float:
        return log_price(self.alpha_violated)


@dataclass(frozen=True)
class CellVerdict:
    """The verdict on one cell, with all information about its numbers (law 3).

    Args:
        kind: certificate, conditional bound (a certificate times declared constants), fact,
            estimate, guard, or "" if nothing was computed.
        value, interval, limit, floor: in units of the clause: the mean of the metric, or for a
            percentile clause the share of tokens above at_most.
        n, units: sample size and its unit; missing: units or tokens without a value.
        e_holds, e_violated: log e-values, nats, to compare with the thresholds.
        share: share of the workload's tokens in the slice.
        stable: estimate of the stable kernel's value, from the same prompts.
        more: projected number of further prompt groups for a decision.
        note, reason: why, in words and by name.
        rounding: its size beside the cost of the kernels' number format, where that was measured.
        assumptions: names in bounds.ASSUMPTIONS that the number needs.
        where: the clause in the contract's text.
        steps: first and last of the training steps that it is about; None: all of the evidence.
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
    reason: Reason = ""
    rounding: str = ""
    assumptions: tuple[str, ...] = ()
    where: Where | None = field(default=None, compare=False)
    steps: tuple[int, int] | None = None

    @property
    def place(self) -> str:
        """The name of its tokens in reports: its slice, and the training steps if not all.

        >>> cell = CellVerdict("gap", "statistical", "tv", "mean", "turn-2", "violated")
        >>> cell.place, cell.but(steps=(4, 6)).place, cell.but(slice="all", steps=(6, 6)).place
        ('turn-2', 'step-4-to-6 turn-2', 'step-6')
        """
        if self.steps is None:
            return self.slice
        first, last = self.steps
        steps = f"step-{last}" if first == last else f"step-{first}-to-{last}"
        return steps if self.slice == WHOLE else f"{steps} {self.slice}"

    def but(self, **changes: Any) -> CellVerdict:
        """The verdict with changes; a new note takes the reason of the old one with it."""
        return replace(self, **({"reason": ""} | changes if "note" in changes else changes))


def limit_of(clause: Clause) -> float:
    """The limit of a clause whose limit must be a number."""
    limit = clause.at_most if clause.at_least is None else clause.at_least
    assert isinstance(limit, float)
    return limit


def blank(cell: Cell, outcome: Outcome, note: str = "", **more: Any) -> CellVerdict:
    """A cell's verdict with only its names."""
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


_CONTRADICTED = {
    "holds": "the data do not contradict it by the first evaluation; it cannot be proved",
    "violated": "they contradict it; the statistical promises then say nothing",
}
_SHARE = {
    "holds": "the share is at least {at_least}: counted, without chance",
    "error": "it is less at the first evaluation; the statistical promises say nothing",
}


class Kind:
    """A kind of clause; each has a `judge`, and those that need evidence a `weigh`.

    `counts`: whether its cells can be violated, and so take a share of alpha.
    `source`: the data: the workload's rounds, the golden texts (a View of either), timed requests,
    batches, corners of the envelope, served requests, the split of users, or none.  `peers`: names
    of required `View.peers`.  `noise`: noise statistics of a peer, for reports; `floor`: the larger
    side's noise floor from all parts, each (train, infer); None if not measured.  `level`: a peer's
    value.  `unexamined`: effects below its power, one sentence each.

    `each`: the unit with a value; `reads`: what suffices if it is counted; `exact`: whether each
    position has a value.  `load`, `corner`: what it is measured under.  `offline_only`: why it
    cannot be judged on traffic, `live_only`: or offline; `applies`: false where it is left out;
    `reason`: why it is not judged.  `standing`: guarantee type of its number, which is at `most`;
    `assumes`: its further assumptions.  `phrase`, `metric_unit`: of its metric under the contract;
    `words`: what its answers say, with {at_least}.
    """

    counts: ClassVar[bool] = False
    source: ClassVar[Source] = "workload"
    peers: ClassVar[tuple[str, ...]] = ()
    each: ClassVar[Literal["token", "sequence"]] = "token"
    reads: ClassVar[Reads] = ""
    exact: ClassVar[bool] = False
    load: LoadOf | None = None
    corner: Corner | None = None
    offline_only: ClassVar[str] = ""
    live_only: ClassVar[str] = ""
    applies: ClassVar[bool] = True
    reason: str = ""
    standing: ClassVar[Standing] = "certificate"
    assumes: ClassVar[tuple[str, ...]] = ()
    metric_unit: ClassVar[str] = ""
    words: ClassVar[Mapping[str, str]] = {}

    @property
    def phrase(self) -> str:
        return ""

    @property
    def most(self) -> float:
        return math.inf

    @property
    def certificate(self) -> Certificate | None:
        """This kind, if it certifies a mean below a number."""
        return None

    def units_at_best(self, alpha: float, /) -> int | None:
        """Units that `holds` needs of identical kernels; None: no number; 0: not known before."""
        return 0

    def weigh(self, cell: Cell, view: Any, /) -> Statistic:
        """The statistic of a measurement; None for a kind that needs none."""
        return None

    def noise(self, cell: Cell, view: Any, /) -> Any:
        return None

    def floor(self, cell: Cell, parts: list[Any], /) -> float | None:
        return None

    def level(self, parts: Sequence[Any], /) -> float | None:
        return None

    def join(self, counted: Sequence[Any], /) -> Statistic:
        """The statistic of disjoint counts, in any order; None where nothing counts for it."""
        known = [part for part in counted if part is not None]
        return reduce(operator.add, known) if known else None

    def adds(self, statistic: Statistic, /) -> bool:
        """Whether a step may be called violated for its tokens and those of the steps before."""
        return True

    def not_in_a_step(self, clause: Clause, /) -> str:
        """Why the counts of a training step do not suffice; "" if they do."""
        counted = self.reads in ("ratio", "lower", "loss", "responses", "tails")
        why = f"{clause.metric} cannot be computed from a training step's logprobs"
        return "" if counted else why

    def judge(
        self, cell: Cell, rounds: list[Statistic], floor: float | None, look: Interim, /
    ) -> CellVerdict:
        raise NotImplementedError

    def answers(self, clause: Clause, wrong: tuple[str, str], /) -> Mapping[str, str]:
        """Outcome -> what it says.

        Args:
            wrong: probability that `holds` is wrong; the same of `violated`, as a parenthesis.
        """
        words = self.words or (_CONTRADICTED if self.counts else _SHARE)
        return {answer: text.format(at_least=clause.at_least) for answer, text in words.items()}

    def unexamined(self, cell: Cell, rounds: list[Statistic], look: Interim, /) -> tuple[str, ...]:
        return ()

    @classmethod
    def declared(cls, contract: Contract, /) -> Kind:  # noqa: ARG003 - most need nothing
        """The validity check of this kind under the declarations of a contract."""
        return cls()

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause, /) -> Iterator[Lack]:  # noqa: ARG003
        """The problems of a contract that prevent a judgement of the clause."""
        yield from ()

    def invalidates(self, other: Kind, /) -> bool:
        """Whether another kind's cells are inconclusive if this validity check fails."""
        return isinstance(other, Sampled)


class Sampled(Kind):
    """Kinds on sampled tokens: inconclusive if a validity check fails."""


GUARDS: Registry[type[Kind]] = Registry("guard", aside=DIVERGENCES)
