# Statistical clauses: an aggregate of a sampled metric, certified by LogMoment.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.clauses.base import Array, Cell, CellVerdict, Look, Source, View, blank
from servanda.contract import Clause, Relative
from servanda.divergence import DIVERGENCES
from servanda.stats import GroupRatio, LogMoment, interval, units_to_decide

Process = LogMoment | GroupRatio


@dataclass(frozen=True)
class Feed:
    """How a metric becomes x in [0, 1], and the limit that its mean is held to.

    A percentile pN at limit L is the promise that at most (100-N) % of the tokens exceed
    L; a mean of an unbounded metric is certified only where the contract clips it.
    """

    limit: float
    scale: float = 1.0  # metric units of one x
    threshold: float | None = None

    def x(self, values_N: Array) -> Array:
        if self.threshold is not None:
            return (values_N > self.threshold).astype(np.float64)
        return np.minimum(values_N / self.scale, 1.0)


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
    if clause.clip is not None:
        return Feed(limit=clause.at_most / clause.clip, scale=clause.clip)
    if DIVERGENCES[clause.metric].bounded:
        high = DIVERGENCES[clause.metric].span[1]
        return Feed(limit=clause.at_most / high, scale=high)
    return None


@dataclass(frozen=True)
class Certificate:
    """`holds` and `violated` by evidence that is valid at every look."""

    feed: Feed
    counts: ClassVar[bool] = True
    source: ClassVar[Source] = "workload"

    def weigh(self, cell: Cell, view: View) -> Process:
        inside_N = view.mask(cell.cut)
        x_N = self.feed.x(view.values(cell.clause.metric))
        known_N = inside_N & ~np.isnan(view.values(cell.clause.metric))
        missing_N = inside_N & ~known_N
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

    def noise(self, cell: Cell, view: View) -> tuple[float, int]:
        """(sum of x, tokens) of a side against itself."""
        values_N = view.values(cell.clause.metric)
        known_N = view.mask(cell.cut) & ~np.isnan(values_N)
        return math.fsum(self.feed.x(values_N[known_N]).tolist()), int(known_N.sum())

    def floor(self, cell: Cell, parts: list[tuple[tuple[float, int], ...]]) -> float | None:
        means = []
        for side in zip(*(p for p in parts if p), strict=True):
            n = sum(count for _, count in side)
            if n:
                means.append(math.fsum(total for total, _ in side) / n)
        return max(means, default=None)

    def fold(self, cell: Cell, statistics: list[Process]) -> Process:
        if cell.claim == "realised":
            return sum(statistics, LogMoment())  # type: ignore[arg-type]
        parts: list[GroupRatio] = statistics  # type: ignore[assignment]
        return GroupRatio(
            cell.capacity,
            sum(p.launched for p in parts),
            tuple(t for p in parts for t in p.total_G),
            tuple(t for p in parts for t in p.tokens_G),
            tuple(t for p in parts for t in p.missing_G),
        )

    def judge(self, cell: Cell, process: Process, floor: float | None, look: Look) -> CellVerdict:
        feed = self.feed
        red_line = max(feed.limit, 2 * (floor or 0.0))
        e_holds = process.log_e_below(feed.limit) if process.n else 0.0
        e_violated = process.log_e_above(red_line) if process.n else 0.0
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            unit="" if feed.threshold is not None else DIVERGENCES[cell.clause.metric].unit,
            value=None if math.isnan(process.mean) else process.mean * feed.scale,
            limit=feed.limit * feed.scale,
            floor=None if floor is None else floor * feed.scale,
            n=process.n,
            units="tokens" if cell.claim == "realised" else "prompt groups",
            missing=process.missing,
            alpha=look.alpha,
            e_holds=e_holds,
            e_violated=e_violated,
            open=True,
        )
        if look.intervals and process.n:
            low, high = interval(process, look.alpha)
            verdict = verdict.but(interval=(low * feed.scale, high * feed.scale))
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
        return verdict.but(more=max(more, look.first - look.launched, 1))
