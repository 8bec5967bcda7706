# Resampling: simulated later runs of the same pair, from the measured one.
#
# The pair is known from one run only, so its distribution is sampled too: each later run first
# samples the weights of this run's prompt groups (the Bayesian bootstrap, Rubin 1981), then groups
# by these weights.  Resampling groups directly would take the run's mean for the pair's, and
# predict 90 % where 82 % hold.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from servanda.authoring.calibrate.recorder import Rounds
from servanda.judgement.clauses.base import Cell, View
from servanda.judgement.clauses.statistical import Certificate, Feed, Units
from servanda.theory.stats.bets import NEG
from servanda.theory.stats.interval import units_to_decide

Floats = NDArray[np.float64]
_TOP = 0.05  # share of the prompt groups that dominate a skewed metric


def draw_counts(groups: int, size: int, resamples: int, rng: np.random.Generator) -> Floats:
    """The count of each prompt group in each later run, [B, G].

    Args:
        groups: number of prompt groups of the run.
        size: prompt groups of a later run.
    """
    weight_BG = rng.standard_exponential((resamples, groups))
    weight_BG /= weight_BG.sum(axis=1, keepdims=True)
    return rng.multinomial(size, weight_BG).astype(np.float64)


def top_share(total_G: Floats) -> float:
    """The share of the largest 5 % of the prompt groups in their sum; 0 if that is 0.

    Values below 0, which only sampling noise gives, count as 0.

    >>> round(top_share(np.array([9.0] + 19 * [1.0])), 2)
    0.32
    """
    total_G = np.sort(np.maximum(total_G, 0.0))
    if not total_G.sum():
        return 0.0
    largest_G = total_G[-math.ceil(_TOP * len(total_G)) :]
    return float(largest_G.sum() / total_G.sum())


@dataclass(frozen=True)
class Resampled:
    """A cell in later runs: whether it holds, per limit.

    Args:
        count_BG: count of each prompt group in each later run.
        log_price: log threshold of `holds`, nats.
    """

    cell: Cell
    kind: Certificate
    rounds: Rounds
    count_BG: Floats
    log_price: float
    _known: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    def at(self, limit: float) -> Certificate:
        """The kind with another limit, in the unit of the metric."""
        feed = self.kind.feed
        if feed.threshold is not None:
            return replace(self.kind, feed=replace(feed, threshold=limit))
        return replace(self.kind, feed=replace(feed, limit=(limit - feed.low) / feed.scale))

    def holds(self, limit: float) -> NDArray[np.bool_]:
        """Mask of the later runs in which the cell holds, [B]."""
        if limit not in self._known:
            kind = self.at(limit)
            growth_BK = self.count_BG @ self._growth(kind)
            top_B = growth_BK.max(axis=1)
            mean_B = np.exp(growth_BK - top_B[:, None]) @ kind.feed.weights[0]
            self._known[limit] = top_B + np.log(mean_B) >= self.log_price
        return self._known[limit]  # type: ignore[return-value]

    def holds_often(self, power: float, limit: float) -> bool:
        return bool(self.holds(limit).mean() >= power)

    def needed(self, limit: float) -> int | None:
        """The number of such prompt groups that show a limit; None if none does."""
        kind = self.at(limit)
        growth_K = self._growth(kind).mean(axis=0)
        return units_to_decide(growth_K, kind.feed.weights[0], 1, self.log_price)

    def _growth(self, kind: Certificate) -> Floats:
        """The contribution of each prompt group to the log e-value, [G, K], nats."""
        x = kind.feed.limit
        total_G, tokens_G, missing_G = self._sums(kind.feed)
        if self.cell.claim == "population":
            excess_G = total_G + missing_G - x * (tokens_G + missing_G)
            z_G = np.clip(x + excess_G / self.cell.capacity, 0.0, 1.0)
            # a group that does not meet the slice has z = x, and adds nothing
            return np.log1p(NEG * z_G[:, None]) - np.log1p(NEG * x)
        logs_GK = self._logs(kind.feed, total_G) + missing_G[:, None] * np.log1p(NEG)
        return logs_GK - (tokens_G + missing_G)[:, None] * np.log1p(NEG * x)

    def _sums(self, feed: Feed) -> tuple[Floats, Floats, Floats]:
        """Sum of x, units with a value and units without, of each prompt group, [G]."""
        key = ("sums", feed.threshold)
        if key not in self._known:
            units = self._units(feed)
            n = len(units.missing_G)
            total_G = np.bincount(units.group_U, weights=units.x_U, minlength=n)
            tokens_G = np.bincount(units.group_U, minlength=n).astype(np.float64)
            self._known[key] = (total_G, tokens_G, units.missing_G.astype(np.float64))
        return self._known[key]  # type: ignore[return-value]

    def _logs(self, feed: Feed, total_G: Floats) -> Floats:
        """Sum of log(1 + t x) of each prompt group, [G, K]."""
        if feed.threshold is not None:  # x is 0 or 1
            return total_G[:, None] * np.log1p(NEG)
        if "logs" not in self._known:
            units = self._units(feed)
            logs = [np.log1p(t * units.x_U) for t in NEG]
            sums = [np.bincount(units.group_U, log_U, len(total_G)) for log_U in logs]
            self._known["logs"] = np.stack(sums, axis=1)
        return self._known["logs"]  # type: ignore[return-value]

    def _units(self, feed: Feed) -> Units:
        """The units of all rounds, with consecutive prompt group numbers."""
        kind = replace(self.kind, feed=feed)
        parts = [kind.units(self.cell, view) for view in self.rounds.own]
        starts = np.cumsum([0, *(len(part.missing_G) for part in parts)])
        return Units(
            np.concatenate([part.x_U for part in parts]),
            np.concatenate([part.group_U + at for part, at in zip(parts, starts, strict=False)]),
            np.concatenate([part.missing_G for part in parts]),
        )

    @property
    def groups_met(self) -> int:
        """Prompt groups of this run that have a unit in the slice."""
        _, tokens_G, missing_G = self._sums(self.kind.feed)
        return int(np.count_nonzero(tokens_G + missing_G))

    @property
    def top(self) -> float | None:
        """The share of the top 5 % of the prompt groups in a mean; None for a percentile."""
        feed = self.kind.feed
        if feed.threshold is not None:
            return None
        total_G, tokens_G, _ = self._sums(feed)
        met_G = tokens_G > 0  # of the whole run: a small slice is met by few groups anyway
        return top_share((total_G - feed.best * tokens_G)[met_G])

    def clear_of_noise(self, limit: float) -> bool:
        """Whether twice the noise floor is within the limit, so that exceeding it is a
        violation.
        """
        kind = self.at(limit)
        floor = self._floor(kind)
        return floor is None or 2 * floor + kind.feed.low / kind.feed.scale <= kind.feed.limit

    def _floor(self, kind: Certificate) -> float | None:
        noise = [tuple(kind.noise(self.cell, v) for v in selves) for selves in self.rounds.selves]
        return kind.floor(self.cell, noise)

    def measured(self) -> float | None:
        """The measured mean or percentile; None without data."""
        if self.kind.feed.threshold is not None:
            return self._percentile(self.rounds.own)
        total_G, tokens_G, _ = self._sums(self.kind.feed)
        n = tokens_G.sum()
        return self.kind.feed.value(float(total_G.sum() / n)) if n else None

    def floor(self) -> float | None:
        """The noise floor of the noisier side; None if not measured."""
        if self.kind.feed.threshold is None:
            floor = self._floor(self.kind)
            return None if floor is None else self.kind.feed.value(floor)
        sides = zip(*filter(None, self.rounds.selves), strict=True)
        percentiles = [self._percentile(side) for side in sides]
        return max((value for value in percentiles if value is not None), default=None)

    def largest(self, *, selves: bool = False) -> float:
        """The largest finite measured value; 0 if there is none.

        Args:
            selves: whether to include the noise data.
        """
        more = [view for views in self.rounds.selves for view in views] if selves else []
        values = self._values((*self.rounds.own, *more))
        return float(values[np.isfinite(values)].max(initial=0.0))

    def _percentile(self, views: Sequence[View]) -> float | None:
        values = self._values(views)
        if not len(values):
            return None
        share = 1 - self.kind.feed.limit
        return float(np.quantile(values, share, method="inverted_cdf"))

    def _values(self, views: Sequence[View]) -> Floats:
        parts = [self.kind.values(self.cell, v)[v.mask(self.cell.cut)] for v in views]
        values = np.concatenate(parts) if parts else np.zeros(0)
        return values[~np.isnan(values)]
