# Statistical clauses: an aggregate of a sampled metric, certified by LogMoment.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.clauses.base import Array, Cell, CellVerdict, Look, Source, View, blank, peak
from servanda.contract import Clause, Relative
from servanda.divergence import DIVERGENCES
from servanda.stats import GroupRatio, LogMoment, interval, units_to_decide

_LITTLE = 0.25  # a fill of less is worth a word

Process = LogMoment | GroupRatio
Noise = tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Feed:
    """How a metric becomes x in [0, 1], and the limit that its mean is held to.

    A percentile pN at limit L is the promise that at most (100-N) % of the tokens exceed
    L; a mean of an unbounded metric is certified only where the contract clips it.
    """

    limit: float
    scale: float = 1.0  # metric units of one x
    threshold: float | None = None
    low: float = 0.0  # the metric where x is 0
    best: float = 0.0  # the smallest mean of x that there is: that of identical kernels

    def x(self, values_N: Array) -> Array:
        if self.threshold is not None:
            return (values_N > self.threshold).astype(np.float64)
        return np.minimum((values_N - self.low) / self.scale, 1.0)

    def value(self, x: float) -> float:
        """In units of the metric."""
        return self.low + x * self.scale

    def red_line(self, floor: float | None) -> float:
        """The x of the limit, or of twice the self-noise where that is more."""
        return max(self.limit, 2 * floor + self.low / self.scale) if floor else self.limit


def feed_of(clause: Clause) -> Feed | None:
    """The feed of a statistical clause; None where this version knows no certificate."""
    if clause.metric not in DIVERGENCES or clause.at_most is None:
        return None
    if isinstance(clause.at_most, Relative):
        return None
    if clause.percentile is not None:
        # 100 - 99.9 carries rounding that nobody wrote
        share = round((100.0 - clause.percentile) / 100.0, 12)
        return Feed(limit=share, threshold=clause.at_most)
    metric = DIVERGENCES[clause.metric]
    low, high = metric.span
    high = high if clause.clip is None else clause.clip
    if not math.isfinite(high - low):
        return None
    # a sampled value may be negative though no mean of them can be
    least = metric.span_of("logits")[0] if "logits" in metric.forms else low
    scale = high - low
    return Feed((clause.at_most - low) / scale, scale, low=low, best=(least - low) / scale)


@dataclass(frozen=True)
class Certificate:
    """`holds` and `violated` by evidence that is valid at every look."""

    feed: Feed
    counts: ClassVar[bool] = True
    source: ClassVar[Source] = "workload"

    def weigh(self, cell: Cell, view: View) -> Process:
        x_N = self.feed.x(view.values(cell.clause.metric))
        known_N = view.mask(cell.cut) & ~np.isnan(view.values(cell.clause.metric))
        missing_N = view.mask(cell.cut, unknown=True) & ~known_N
        room = cell.cut.positions(view.width)
        lost_S = view.lost(cell.cut)
        if cell.claim == "realised":
            missing = int(missing_N.sum()) + room * len(lost_S)
            return LogMoment.of(x_N[known_N], missing)
        groups = view.launched
        total_G = np.bincount(view.group_N[known_N], weights=x_N[known_N], minlength=groups)
        tokens_G = np.bincount(view.group_N[known_N], minlength=groups)
        missing_G = np.bincount(view.group_N[missing_N], minlength=groups)
        missing_G = missing_G + room * np.bincount(view.group_S[lost_S], minlength=groups)
        met = np.flatnonzero((tokens_G > 0) | (missing_G > 0))
        return GroupRatio(
            cell.capacity,
            groups,
            tuple(total_G[met].tolist()),
            tuple(tokens_G[met].tolist()),
            tuple(missing_G[met].tolist()),
        )

    def noise(self, cell: Cell, view: View) -> Noise:
        """(sum of x, tokens) of a side against itself: on the slice, and on the whole."""
        values_N = view.values(cell.clause.metric)
        known_N = ~np.isnan(values_N)
        return tuple(
            (math.fsum(self.feed.x(values_N[inside_N]).tolist()), int(inside_N.sum()))
            for inside_N in (known_N & view.mask(cell.cut), known_N)
        )

    def floor(self, cell: Cell, parts: list[tuple[Noise, ...]]) -> float | None:
        """Of the slice, or of the whole where the tenth never met the slice."""
        means = []
        for side in zip(*(p for p in parts if p), strict=True):
            for part in zip(*side, strict=True):  # the slice, then the whole
                n = sum(count for _, count in part)
                if n:
                    means.append(math.fsum(total for total, _ in part) / n)
                    break
        return max(means, default=None)

    def _total(self, cell: Cell, rounds: list[Process]) -> Process:
        if cell.claim == "realised":
            return sum(rounds, LogMoment())  # type: ignore[arg-type]
        return GroupRatio.join(cell.capacity, rounds)  # type: ignore[arg-type]

    def judge(
        self, cell: Cell, rounds: list[Process], floor: float | None, look: Look
    ) -> CellVerdict:
        feed, process = self.feed, self._total(cell, rounds)
        red_line = feed.red_line(floor)
        e_holds = process.log_e_below(feed.limit) if process.n else 0.0
        if cell.claim == "realised":
            # speaks of the tokens measured so far, so what was red may be so no more
            e_violated = process.log_e_above(red_line) if process.n else 0.0
        else:
            e_violated = peak([r.above_growth(red_line) for r in rounds if r.n])
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            unit="" if feed.threshold is not None else DIVERGENCES[cell.clause.metric].unit,
            value=None if math.isnan(process.mean) else feed.value(process.mean),
            limit=feed.value(feed.limit),
            floor=None if floor is None else feed.value(floor),
            n=process.n,
            units="tokens" if cell.claim == "realised" else "prompt groups",
            missing=process.missing,
            threshold=feed.threshold,
            alpha=look.alpha,
            e_holds=e_holds,
            e_violated=e_violated,
            open=True,
        )
        if look.intervals and process.n:
            low, high = interval(process, look.alpha)
            verdict = verdict.but(interval=(feed.value(low), feed.value(high)))
        if not process.n:
            return verdict.but(note=f"slice {cell.cut.name!r} met no token; widen the workload")
        if e_violated >= look.log_price_violated:
            return verdict.but(outcome="violated", open=False)
        if e_holds >= look.log_price_holds and look.launched >= look.first:
            return verdict.but(outcome="holds", open=False)
        return self._undecided(verdict, process, red_line, look)

    def _undecided(
        self, verdict: CellVerdict, process: Process, red_line: float, look: Look
    ) -> CellVerdict:
        """Why nothing is said yet, and how many more prompt groups would decide."""
        limit = self.feed.limit
        mean = process.mean
        if limit < mean <= red_line:
            return verdict.but(
                note="beyond the limit, yet within twice the self-noise floor: "
                "no kernel could do better here"
            )
        if math.isnan(mean) or mean <= limit:
            growth, price = process.below_growth(limit), look.log_price_holds
        else:
            growth, price = process.above_growth(red_line), look.log_price_violated
        units = units_to_decide(growth, process.n, price)
        if units is None:
            return verdict.but(note="too near the limit to tell; raise the limit or the sizes")
        # a slice meets only some of the groups: convert its units to launched groups
        more = math.ceil((units - process.n) * look.launched / process.n)
        return verdict.but(
            more=max(more, look.first - look.launched, 1), note=_why_so_many(process)
        )


def _why_so_many(process: Process) -> str:
    """Room that no answer fills is paid for in prompt groups; say so where it is most of it."""
    if not isinstance(process, GroupRatio):
        return ""
    filled = (process.tokens + process.missing) / process.n
    if filled >= _LITTLE * process.capacity:
        return ""
    return (
        f"a prompt group has room for {process.capacity:,} tokens here and fills {filled:,.0f}: "
        "a lower max_new_tokens, or claim: realised, decides sooner"
    )
