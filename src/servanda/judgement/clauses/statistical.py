# Statistical clauses: an aggregate of a sampled metric, certified by LogMoment.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from servanda.contract.clause import Clause, Relative
from servanda.judgement.clauses.base import (
    FLOOR,
    WITHIN_NOISE,
    Array,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Sampled,
    View,
    blank,
    peak,
)
from servanda.judgement.slices.rules import Known
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.bets import mixed, weights_above, weights_below
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.interval import interval, units_at_best, units_to_decide
from servanda.theory.stats.log_moment import LogMoment

# divergences of a sampled token that depend only on log p - log q
RATIO_METRICS = (
    *("tv", "k1_nats", "k2_nats", "k3_nats", "kl_reverse_nats"),
    *("chi2", "le_cam", "abs_log_ratio_nats"),
)
_FLOOR_TOKENS = 50  # below this, one outlier would make too large a noise floor
_LITTLE = 0.25  # a lower fill is mentioned

Process = LogMoment | GroupRatio
Noise = tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Units:
    """One round's x in [0, 1] per unit, and the number of units without a value, by group.

    Args:
        x_U, group_U: x and group of each unit with a value, in dispatch order.
        missing_G: units without a value, per dispatched prompt group.
    """

    x_U: Array
    group_U: Array
    missing_G: Array

    def process(self, cell: Cell) -> Process:
        if cell.claim == "realised":
            return LogMoment.of(self.x_U, int(self.missing_G.sum()))
        groups = len(self.missing_G)
        total_G: Array = np.bincount(self.group_U, weights=self.x_U, minlength=groups)
        known_G = np.bincount(self.group_U, minlength=groups)
        met_G = (known_G > 0) | (self.missing_G > 0)
        parts = (total_G[met_G], known_G[met_G], self.missing_G[met_G])
        return GroupRatio(cell.capacity, groups, *parts)


def units_of(cell: Cell, view: View, x_N: Array) -> Units:
    """The tokens of one round in a cell; NaN: no value."""
    given = cell.cut.given
    known_N = view.mask(given) & ~np.isnan(x_N)
    missing_N = view.mask(given, unknown=True) & ~known_N
    room, lost_S = given.positions(view.width), view.lost(given)
    missing_G = np.bincount(view.group_N[missing_N], minlength=view.launched)
    missing_G = missing_G + room * np.bincount(view.group_S[lost_S], minlength=view.launched)
    return Units(x_N[known_N], view.group_N[known_N], missing_G)


def sequence_units(cell: Cell, view: View, x_S: Array) -> Units:
    """One round's x in [0, 1] of each dispatched sequence in a cell.

    A lost sequence, or one with a token without a logprob, has no value (NaN).
    """
    inside_S = view.may_meet[cell.cut]
    known_S = inside_S & ~np.isnan(x_S)
    missing_G = np.bincount(view.group_S[inside_S & ~known_S], minlength=view.launched)
    return Units(x_S[known_S], view.group_S[known_S], missing_G)


def total(cell: Cell, rounds: Sequence[Process]) -> Process:
    if cell.claim == "realised":
        return sum(rounds, LogMoment())  # type: ignore[arg-type]
    return GroupRatio.join(cell.capacity, rounds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Grown:
    """One round's statistics, and its log e-values about the limit, which are additive."""

    process: Process
    below: Array
    above: Array

    def __repr__(self) -> str:
        return repr(self.process)  # the rest is derived from it

    def __add__(self, other: Grown) -> Grown:
        """Two rounds as one; exact only for a realised claim."""
        assert isinstance(self.process, LogMoment) and isinstance(other.process, LogMoment)
        return Grown(
            self.process + other.process, self.below + other.below, self.above + other.above
        )


@dataclass(frozen=True)
class Tally:
    """The totals of the closed rounds, without joining them.

    Args:
        n: units; known, missing: counts of LogMoment's units or GroupRatio's tokens; total: sum of
            x.
    """

    n: int
    known: int
    missing: int
    total: float

    @classmethod
    def of(cls, processes: Sequence[Process]) -> Tally:
        return cls(
            n=sum(p.n for p in processes),
            known=sum(p.known for p in processes),
            missing=sum(p.missing for p in processes),
            total=math.fsum(p.total for p in processes),
        )

    @property
    def mean(self) -> float:
        """The mean of x; NaN without data."""
        return self.total / self.known if self.known else math.nan


# assumptions of every number from sampled tokens; the last only for a population
ALWAYS = ("sampler", "order", "same_tokens", "independent")


def rests_on(cell: Cell, more: Sequence[str] = ()) -> tuple[str, ...]:
    """The assumptions of every number from sampled tokens, and those of a cell."""
    return (*(ALWAYS if cell.claim == "population" else ALWAYS[:-1]), *more)


class BySequence(Kind):
    """Kinds whose units are dispatched sequences; defined on slices of requests."""

    each: ClassVar[Literal["token", "sequence"]] = "sequence"
    known: ClassVar[Known] = "request"


@dataclass(frozen=True)
class Certificate(Sampled):
    """`holds` and `violated` by anytime-valid evidence."""

    feed: Feed
    counts: ClassVar[bool] = True

    @property
    def certificate(self) -> Certificate | None:
        return self

    @property
    def most(self) -> float:
        return self.feed.value(1.0)

    def units_at_best(self, alpha: float) -> int | None:
        return units_at_best(self.feed.limit, alpha, self.feed.best)

    def answers(self, clause: Clause, wrong: tuple[str, str]) -> Mapping[str, str]:
        what = "the mean" if clause.percentile is None else "the share"
        holds = "never: the mean of a metric without bound can only be refuted"
        if self.feed.proves:
            holds = f"the data show {what} below the limit (wrong: at most {wrong[0]})"
        return {"holds": holds, "violated": f"they show it above the limit and {FLOOR}{wrong[1]}"}

    def not_in_a_step(self, clause: Clause) -> str:
        return "" if clause.metric in RATIO_METRICS else super().not_in_a_step(clause)

    def of_rounding(self, error_N: Array, length_S: Array, /) -> float | None:
        """The value that rounding of the log ratios alone causes; None: not known.

        Args:
            error_N: equally likely errors, nats, ascending and symmetric; length_S: tokens of each
                response.
        """
        return None

    def weigh(self, cell: Cell, view: View) -> Grown:
        return self.grown(self.process(cell, view))

    def join(self, counted: Sequence[Any]) -> Grown:
        moments: list[Any] = [p.process if isinstance(p, Grown) else p for p in counted]
        # the total is rounded once, so that it does not depend on the order
        whole = sum(moments, LogMoment())
        return self.grown(replace(whole, total=math.fsum(part.total for part in moments)))

    def grown(self, process: Process) -> Grown:
        """The statistics of one round, with their evidence about the limit."""
        limit = self.feed.limit
        return Grown(process, process.below_growth(limit), process.above_growth(limit))

    def of_values(self, value_U: Array) -> Grown:
        """The statistics of recorded units of a realised claim, from the metric; NaN: no value."""
        known_U = ~np.isnan(value_U)
        missing = int(np.count_nonzero(~known_U))
        return self.grown(LogMoment.of(self.feed.x(value_U[known_U]), missing))

    def values(self, cell: Cell, view: View) -> Array:
        """The metric at each token, [N]; NaN without a value."""
        return view.values(cell.clause.metric)

    def unit(self, cell: Cell) -> str:
        """The unit of the metric."""
        return DIVERGENCES[cell.clause.metric].unit

    def process(self, cell: Cell, view: View) -> Process:
        """The statistics of one round, of both kernels or of one kernel with itself.

        On a slice of outcomes every token of its contexts is a unit, and those with an outcome
        outside count 0, so that the mean is the contribution of the slice.
        """
        return self.units(cell, view).process(cell)

    def units(self, cell: Cell, view: View) -> Units:
        """The units of `process`."""
        return units_of(cell, view, self._x(cell, view))

    def _x(self, cell: Cell, view: View) -> Array:
        """x of each token, [N]; x of 0 outside a slice of outcomes, NaN if unknown."""
        values_N, inside_N = self.values(cell, view), view.inside(cell.cut)
        x_N = np.where(inside_N == 1, self.feed.x(values_N), self.feed.x(np.zeros(1)))
        return np.where(np.isnan(values_N + inside_N), np.nan, x_N)

    def noise(self, cell: Cell, view: View) -> Noise:
        """(sum of x, tokens) of a peer: on the slice, and on the whole."""
        values_N = self.values(cell, view)
        whole_N = self.feed.x(values_N[~np.isnan(values_N)])
        inside_N = self._x(cell, view)[view.mask(cell.cut.given)]
        inside_N = inside_N[~np.isnan(inside_N)]
        return (
            (math.fsum(inside_N.tolist()), len(inside_N)),
            (math.fsum(whole_N.tolist()), len(whole_N)),
        )

    def floor(self, cell: Cell, parts: list[tuple[Noise, ...]]) -> float | None:
        """The floor of the slice, or of the whole if too few tokens of the slice were re-scored."""
        means = []
        for side in zip(*(p for p in parts if p), strict=True):
            inside, whole = zip(*side, strict=True)
            enough = sum(n for _, n in inside) >= min(_FLOOR_TOKENS, sum(n for _, n in whole))
            means.append(_mean(inside if enough else whole))
        return max(filter(_is_number, means), default=None)

    def level(self, parts: Sequence[Noise]) -> float | None:
        """A peer's mean on the slice, in units of the metric; None without tokens."""
        mean = _mean([part[0] for part in parts])
        return self.feed.value(mean) if _is_number(mean) else None

    def judge(
        self, cell: Cell, rounds: list[Grown], floor: float | None, look: Interim
    ) -> CellVerdict:
        feed, measured = self.feed, [r for r in rounds if r.process.n]
        red_line = feed.red_line(floor)
        below = sum((r.below for r in measured), np.zeros(1))
        # twice the floor is rarely above the limit, and changes between evaluations; the weights
        # stay those of the limit, for which evidence at any larger mean is smaller, hence valid
        weight_below, weight_above = feed.weights
        at_limit = red_line == feed.limit
        above = [r.above if at_limit else r.process.above_growth(red_line) for r in measured]
        e_holds = mixed(below, weight_below) if measured and feed.proves else 0.0
        e_violated = peak(above, cell.claim, weight_above)
        processes = [r.process for r in rounds]
        verdict = self.described(cell, processes, floor, look).but(
            limit=feed.value(feed.limit), e_holds=e_holds, e_violated=e_violated
        )
        if not measured:
            return verdict.but(note=f"slice {cell.cut.name!r} met no token; widen the workload")
        if e_violated >= look.log_price_violated:
            return verdict.but(outcome="violated", open=False)
        if e_holds >= look.log_price_holds and look.launched >= look.first:
            return verdict.but(outcome="holds", open=False)
        if not feed.proves:
            return verdict.but(
                kind="estimate",
                note="an estimate: the mean of a metric without bound is never certified",
            )
        tally = Tally.of(processes)
        if feed.limit < tally.mean <= red_line:
            return verdict.but(note=WITHIN_NOISE, reason="within noise")
        if math.isnan(tally.mean) or tally.mean <= feed.limit:
            units = units_to_decide(below, weight_below, tally.n, look.log_price_holds)
        else:
            grown = sum(above, np.zeros(1))
            units = units_to_decide(grown, weight_above, tally.n, look.log_price_violated)
        if units is None:
            return verdict.but(note="too near the limit to tell; raise the limit or the sizes")
        # a slice meets only some of the groups: convert its units to dispatched groups
        more = math.ceil((units - tally.n) * look.launched / tally.n)
        return verdict.but(
            more=max(more, look.first - look.launched, 1), note=_why_so_many(cell, tally)
        )

    def described(
        self, cell: Cell, processes: Sequence[Process], floor: float | None, look: Interim
    ) -> CellVerdict:
        """A cell's verdict without its outcome."""
        feed, tally = self.feed, Tally.of(processes)
        verdict = blank(
            cell,
            "inconclusive",
            kind=self.standing,
            unit="" if feed.threshold is not None else self.unit(cell),
            value=None if math.isnan(tally.mean) else feed.value(tally.mean),
            floor=None if floor is None else feed.value(floor),
            n=tally.n,
            units=cell.units_of(self.each),
            missing=tally.missing,
            threshold=feed.threshold,
            alpha=look.alpha,
            assumptions=rests_on(cell, self.assumes),
            open=True,
        )
        if look.intervals and tally.n:
            low, high = interval(total(cell, processes), look.alpha, feed.limit, feed.best)
            verdict = verdict.but(interval=(feed.value(low), feed.value(high)))
        return verdict


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    n = sum(count for _, count in parts)
    return math.fsum(total for total, _ in parts) / n if n else math.nan


def _is_number(value: float) -> bool:
    return not math.isnan(value)


def _why_so_many(cell: Cell, tally: Tally) -> str:
    """A note if most of the allowed length is unused, which costs prompt groups."""
    if cell.claim == "realised":
        return ""
    filled = (tally.known + tally.missing) / tally.n
    if filled >= _LITTLE * cell.capacity:
        return ""
    return (
        f"a prompt group has room for {cell.capacity:,} tokens here and fills {filled:,.0f}: "
        "a lower max_new_tokens, or claim: realised, decides sooner"
    )


# Feeds: the scaling of a metric's values to x in [0, 1], and the limit of their mean.


_HAIR = 1e-9  # tolerance below 0 for rounding; beyond it the statistics raise an error
_CUT = 20.0  # limits after which an unbounded metric is cut, for refutation


@dataclass(frozen=True)
class Feed:
    """x = (value - low) / scale, cut at 1; or whether a value exceeds a threshold.

    Args:
        limit: of the mean of x.
        scale, low: metric units per x, and at x = 0.
        threshold: a percentile pN at limit L means that at most (100-N) % of the tokens exceed L;
            limit is then that share.
        best: the smallest possible mean of x, for identical kernels.
        proves: whether a small mean of x implies a small mean of the metric; false if the metric is
            cut without `clip` in the contract.
    """

    limit: float
    scale: float = 1.0
    low: float = 0.0
    threshold: float | None = None
    best: float = 0.0
    proves: bool = True

    def x(self, values_N: Array) -> Array:
        if self.threshold is not None:
            return (values_N > self.threshold).astype(np.float64)
        x_N = np.minimum((values_N - self.low) / self.scale, 1.0)
        return np.where((x_N < 0) & (x_N > -_HAIR), 0.0, x_N)

    def value(self, x: float) -> float:
        """A mean of x in units of the metric."""
        return self.low + x * self.scale

    @property
    def weights(self) -> tuple[Array, Array]:
        """The weights of the bets for a mean below the limit, and for one above."""
        return weights_below(self.limit, self.best), weights_above(self.limit, self.best)

    def red_line(self, floor: float | None) -> float:
        """The mean of x above which a cell is violated: the limit, or twice the noise floor."""
        return max(self.limit, 2 * floor + self.low / self.scale) if floor else self.limit


def share_beyond(clause: Clause) -> float:
    """The share of tokens that may exceed the limit of a percentile clause."""
    assert clause.percentile is not None
    # avoid the rounding error of 100 - 99.9
    return round((100.0 - clause.percentile) / 100.0, 12)


def feed_of(clause: Clause) -> Feed | None:
    """The feed of a statistical clause; None without a certificate."""
    metric, limit = DIVERGENCES[clause.metric], clause.at_most
    if limit is None:
        return None
    relative = isinstance(limit, Relative)
    if clause.percentile is not None:
        return None if relative else Feed(limit=share_beyond(clause), threshold=limit)
    low, high = metric.span
    high = high if clause.clip is None else clause.clip
    if low == 0.0 and math.isinf(high) and not relative and limit > 0:
        return Feed(limit=1 / _CUT, scale=_CUT * limit, proves=False)
    if not math.isfinite(high - low):
        return None
    # a sampled value may be negative though its mean cannot
    least = metric.span_of("logits")[0] if "logits" in metric.forms else low
    scale = high - low
    # the limit of a relative clause is known only at judgement
    at = 1.0 if relative else (limit - low) / scale
    return Feed(at, scale, low=low, best=(least - low) / scale)


Sides = tuple[Process, Process]  # of the slice, and of its complement


# The mass gap: the difference of the two kernels' probabilities of a set of outcomes.
#
# p(S) - q(S) is bounded from both sides by means of bounded variables, without assuming that infer
# can sample every token of train: with w cut at 2,
#
#     q(S) - p(S)  <=  E_infer 1_S (1 - min(w, 2))
#     p(S) - q(S)  <=  E_infer 1_not-S (1 - min(w, 2)),
#
# because cutting only reduces p, and a gain of S is a loss of its complement.  Each bound is
# certified at half of alpha.


@dataclass(frozen=True)
class MassGap(Sampled):
    """|p(S) - q(S)| of a slice of outcomes, per token of its contexts, is at most the limit."""

    limit: float
    counts = True

    words: ClassVar[Mapping[str, str]] = {
        "holds": "the data show both kernels' mass there within the limit of each other",
        "violated": "they show it further apart, beyond the limit and " + FLOOR,
    }

    def weigh(self, cell: Cell, view: View) -> Sides:
        inside_N = view.inside(cell.cut)
        return self._process(cell, view, inside_N), self._process(cell, view, 1 - inside_N)

    def _process(self, cell: Cell, view: View, inside_N: Array) -> Process:
        """1 - min(w, 2) where inside, else 0; mapped from [-1, 1] to [0, 1]."""
        values_N = view.values("mass_gap")
        x_N = np.where(inside_N == 1, (1 - np.minimum(values_N, 1.0)) / 2, 0.5)
        known_N = np.where(np.isnan(values_N + inside_N), np.nan, x_N)
        return units_of(cell, view, known_N).process(cell)

    def noise(self, cell: Cell, view: View) -> tuple[float, int]:
        """(sum of w - 1 over the slice, cut at 1; tokens of its contexts) of a peer."""
        values_N = view.values("mass_gap")
        inside_N = view.inside(cell.cut)
        known_N = view.mask(cell.cut.given) & ~np.isnan(values_N + inside_N)
        within_N = known_N & (inside_N == 1)
        return float(np.minimum(values_N[within_N], 1.0).sum()), int(known_N.sum())

    def floor(self, cell: Cell, parts: list[tuple[tuple[float, int], ...]]) -> float | None:
        gaps = []
        for side in zip(*(p for p in parts if p), strict=True):
            n = sum(count for _, count in side)
            if n:
                gaps.append(abs(sum(total for total, _ in side)) / n)
        return max(gaps, default=None)

    def judge(
        self, cell: Cell, rounds: list[Sides], floor: float | None, look: Interim
    ) -> CellVerdict:
        inside, outside = (total(cell, [r[i] for r in rounds]) for i in (0, 1))
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            value=1 - 2 * inside.mean if inside.n else None,
            limit=self.limit,
            floor=floor,
            n=inside.n,
            units=cell.units,
            missing=inside.missing,
            alpha=look.alpha,
            assumptions=rests_on(cell),
            open=True,
        )
        if not inside.n:
            return verdict.but(note=f"slice {cell.cut.name!r} met no token; widen the workload")
        low, high = _gap(inside, outside, look.alpha)
        verdict = verdict.but(interval=(low, high))
        if -self.limit <= low and high <= self.limit and look.launched >= look.first:
            return verdict.but(outcome="holds", open=False)
        red_line = max(self.limit, 2 * (floor or 0.0))
        low, high = _gap(inside, outside, look.alpha_violated)
        if low > red_line or high < -red_line:
            return verdict.but(outcome="violated", open=False)
        if self.limit < abs(verdict.value or 0.0) <= red_line:
            return verdict.but(note=WITHIN_NOISE, reason="within noise")
        return verdict.but(more=max(look.launched, look.first - look.launched, 1))


def _gap(inside: Process, outside: Process, alpha: float) -> tuple[float, float]:
    """The anytime-valid interval of p(S) - q(S) at confidence 1 - alpha."""
    ends = [2 * interval(process, shared(alpha, 2))[1] - 1 for process in (inside, outside)]
    return -ends[0], ends[1]


# Limits relative to a measurement: the noise floor of the two kernels, or the stable kernel.
#
# Two unknown means are compared by anytime-valid intervals, each at its share of alpha: x <= times
# * y holds if the upper end of x is at most `times` the lower end of y.  No assumption is made
# about their dependence.


@dataclass(frozen=True)
class Compared:
    """The statistics of one round: of the pair, and of each peer."""

    own: Process
    peers: Mapping[str, Process]


@dataclass(frozen=True)
class RelativeCertificate(Certificate):
    """A certificate whose limit is `times` the largest of the peers' means."""

    times: float = 1.0
    whose: ClassVar[str] = ""

    @property
    def certificate(self) -> None:
        """The limit is known only once it is measured."""
        return None

    def units_at_best(self, alpha: float) -> int | None:
        return 0

    def not_in_a_step(self, clause: Clause) -> str:
        return "a training step has no noise floor and no stable kernel to compare with"

    def weigh(self, cell: Cell, view: View) -> Compared:  # type: ignore[override]
        peers = {
            name: self.process(cell, view.peers[name]) for name in self.peers if name in view.peers
        }
        return Compared(self.process(cell, view), peers)

    def judge(  # type: ignore[override]
        self, cell: Cell, rounds: list[Compared], floor: float | None, look: Interim
    ) -> CellVerdict:
        own = total(cell, [r.own for r in rounds])
        peers = [
            total(cell, [r.peers[name] for r in rounds if name in r.peers]) for name in self.peers
        ]
        peers = [peer for peer in peers if peer.n]
        verdict = self.described(cell, [own], floor, look)
        if not own.n or not peers:
            what = "the slice met no token" if not own.n else f"{self.whose} was not measured there"
            return verdict.but(note=f"{what}; widen the workload")
        feed = self.feed
        mean = feed.value(own.mean)
        limit = self.times * max(feed.value(peer.mean) for peer in peers)
        verdict = verdict.but(
            limit=limit,
            note=f"the limit is {self.times:g} times {self.whose}, which was measured beside it",
        )
        share = shared(look.alpha, 2)  # own and peers
        ends = [self._ends(peer, shared(share, len(peers))) for peer in peers]
        if self._ends(own, share)[1] <= self.times * max(low for low, _ in ends):
            if look.launched >= look.first:
                return verdict.but(outcome="holds", open=False)
            return verdict
        share = shared(look.alpha_violated, 2)
        ends = [self._ends(peer, shared(share, len(peers))) for peer in peers]
        noise = 2 * feed.value(floor) if floor else 0.0
        if self._ends(own, share)[0] > max(self.times * max(high for _, high in ends), noise):
            return verdict.but(outcome="violated", open=False)
        if limit < mean <= noise:
            return verdict.but(note=WITHIN_NOISE, reason="within noise")
        # a doubling, because one evaluation does not predict when two intervals separate
        more = max(look.launched, look.first - look.launched, math.ceil(own.n / 2), 1)
        if not limit:
            note = f"{self.whose} is exactly 0 so far: no sample can show that a mean is 0; "
            # if the kernels differ, more rounds can still show it
            return verdict.but(
                open=mean > 0,
                more=more if mean > 0 else None,
                note=note + "write a number as the limit",
            )
        return verdict.but(more=more)

    def _ends(self, process: Process, alpha: float) -> tuple[float, float]:
        low, high = interval(process, alpha)
        return self.feed.value(low), self.feed.value(high)


@dataclass(frozen=True)
class RelativeToNoise(RelativeCertificate):
    peers: ClassVar[tuple[str, ...]] = ("self_train", "self_infer")
    whose: ClassVar[str] = "the noise floor of the noisier side"


@dataclass(frozen=True)
class RelativeToStable(RelativeCertificate):
    peers: ClassVar[tuple[str, ...]] = ("stable",)
    whose: ClassVar[str] = "what the stable kernel has"
