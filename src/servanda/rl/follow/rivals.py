# Rivals: explanations of an engine's scores, each a claim about the weights that it holds.
#
# A rival predicts the engine's change since a reference sync.  Two of them are compared by the
# slope of the engine's change, minus the prediction of the second, on the difference of their
# predictions: 1 if the first is true, 0 if the second is, and in between or outside if neither is.
#
# Axes: K syncs of a window, N scored tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from servanda.rl.follow.score_history import Scores
from servanda.theory.sampling import Floats, Ints
from servanda.theory.stats.slope import EVERYTHING, slope_interval, slope_of, unit_sums

FOLLOWS, FROZEN, STOP = "follows", "frozen", "stop"
# an engine that holds the weights of the reference repeats its scores: its slope is 0, but for the
# rounding of float64
_EXACT = 1e-6
STACKED = 16  # syncs of a window that are used, the last ones: more cost time, and add little


@dataclass(frozen=True)
class Rival:
    """An explanation of the engine's scores.

    Args:
        name: such as "late 1".
        held: number of a sync -> number of the sync whose weights the engine then holds; None: the
            weights of the reference sync, whichever it is.
    """

    name: str
    held: Callable[[int], int] | None


def _late(by: int) -> Rival:
    return Rival(f"late {by}", lambda look: max(0, look - by))


def _every_other(first: int) -> Rival:
    return Rival(f"dropped {first}", lambda look: max(0, look - (look - first) % 2))


RIVALS = (
    Rival(FOLLOWS, lambda look: look),
    Rival(FROZEN, None),
    _late(1),
    _late(2),
    _every_other(0),
    _every_other(1),
)

MISSED = 2  # last syncs that may not have arrived


def missed(newest: int, since: int) -> tuple[Rival, ...]:
    """The rivals that the last sync did not arrive, or the last two, within a window."""

    def held_after(last: int) -> Callable[[int], int]:
        return lambda look: min(look, last)

    lasts = (newest - by for by in range(1, MISSED + 1))
    return tuple(Rival(f"stopped {last}", held_after(last)) for last in lasts if last > since)


def passing(since: int, newest: int, kind: str) -> list[Rival]:
    """Rivals of a pattern in time that pass, or begin, within a window.

    Args:
        kind: "late" or "dropped", the pattern; a late engine that began late is one, too.
    """
    looks = range(max(since, newest - STACKED), newest + 1)

    def stop(first: int, last: int) -> Rival:
        return Rival(STOP, lambda look: first if first <= look <= last else look)

    def late(first: int, last: int, by: int) -> Rival:
        return Rival(STOP, lambda look: max(0, look - by) if first <= look <= last else look)

    bys = range(1, MISSED + 1)
    # it may have begun before the reference
    firsts = [max(0, looks[0] - by) for by in bys] + [*looks]
    found = [stop(a, b) for a in firsts for b in looks if a < b]
    if kind != "late":
        found += [late(look, newest, by) for look in looks for by in bys]
        found += [late(looks[0], look, by) for look in looks for by in bys]
    return found


@dataclass(frozen=True)
class Slope:
    """A slope of the engine's change, with an interval.

    Args:
        value: NaN if the two predictions are equal.
        low, high: at the error probability of this evaluation; infinite if nothing is known.
        rest_nats: root of the mean square of the change that it does not explain.
        moved_nats: the same of the difference of the predictions.
    """

    value: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    rest_nats: float = math.nan
    moved_nats: float = 0.0

    def excludes(self, slope: float, by: float) -> bool:
        """Whether every slope of the interval is farther than `by` from this one."""
        return self.low > slope + by or self.high < slope - by

    def inside(self, by: float) -> bool:
        """Whether every slope of the interval is within `by` of 1."""
        return self.low >= 1 - by and self.high <= 1 + by


@dataclass(frozen=True)
class Window:
    """The syncs after a reference, up to the newest.

    Args:
        kept: number of a sync -> its scores.
        since, newest: numbers of the reference and of the newest.
        start_U: index of the first token of each row.
        parts: group -> the trainer's scores at the newest sync, with this group as at the first
            sync, [N], nats.
    """

    kept: Mapping[int, Scores]
    since: int
    newest: int
    start_U: Ints
    replica: str
    parts: Mapping[str, Floats]
    rounding_nats: float = 0.0
    stacked: int = STACKED

    def slope(self, first: Rival | str, second: Rival | str, alpha: float) -> Slope:
        """The slope of two rivals; a text is a group of weights that stays at the first sync."""
        looks = self._looks(first, second)
        if not looks:
            return Slope()
        train_KN = np.stack([self.kept[look].train_N for look in looks])
        there_KN = np.stack([self.kept[look].infer[self.replica] for look in looks])
        start = self.kept[self.since]
        first_KN = self._change(first, looks, train_KN)
        second_KN = self._change(second, looks, train_KN)
        x_KN = first_KN - second_KN
        y_KN = there_KN - start.infer[self.replica] - second_KN
        n = x_KN.size
        if not math.isfinite(float(x_KN.sum() + y_KN.sum())):  # some scores are missing
            known_N = np.isfinite(x_KN + y_KN).all(axis=0)
            x_KN, y_KN = np.where(known_N, x_KN, 0.0), np.where(known_N, y_KN, 0.0)
            n = int(known_N.sum()) * len(looks)
        found = _slope(x_KN, y_KN, self.start_U, alpha, n)
        if not found.moved_nats:
            return found
        wider = 2 * (self.rounding_nats / found.moved_nats) ** 2
        return replace(found, low=found.low - wider, high=found.high + wider)

    def rest_nats(self, rival: Rival | str) -> float:
        """Root of the mean square of the engine's change that a rival leaves; NaN: unknown."""
        looks = self._looks(rival, rival)
        if not looks:
            return math.nan
        train_KN = np.stack([self.kept[look].train_N for look in looks])
        there_KN = np.stack([self.kept[look].infer[self.replica] for look in looks])
        own_KN = self._change(rival, looks, train_KN)
        rest_KN = there_KN - self.kept[self.since].infer[self.replica] - own_KN
        known = rest_KN[np.isfinite(rest_KN)]
        return math.sqrt(float((known**2).mean())) if known.size else math.nan

    def _looks(self, *rivals: Rival | str) -> list[int]:
        """The syncs of the window for which the prediction of each is known."""
        if any(isinstance(rival, str) for rival in rivals):
            return [self.newest] if self.since == 0 else []
        helds = [rival.held for rival in rivals if isinstance(rival, Rival) and rival.held]
        if any(held(self.since) not in self.kept for held in helds):
            return []
        known = [
            look
            for look, scores in self.kept.items()
            if look > self.since
            and self.replica in scores.infer
            and all(held(look) in self.kept for held in helds)
        ]
        return known[-self.stacked :]

    def _change(self, rival: Rival | str, looks: Sequence[int], train_KN: Floats) -> Floats:
        """The predicted change of the engine since the reference, [K, N]."""
        if isinstance(rival, str):
            return (self.parts[rival] - self.kept[self.since].train_N)[None]
        if rival.held is None:
            return np.zeros_like(train_KN)
        before = self.kept[rival.held(self.since)].train_N
        return np.stack([self.kept[rival.held(look)].train_N for look in looks]) - before


def _slope(x_KN: Floats, y_KN: Floats, start_U: Ints, alpha: float, n: int) -> Slope:
    xy_U, xx_U = unit_sums(x_KN, y_KN, start_U)
    if not xx_U.size:
        return Slope()
    value = slope_of(xy_U, xx_U)
    low, high = slope_interval(xy_U, xx_U, alpha)
    xx, xy, yy = np.vdot(x_KN, x_KN), np.vdot(x_KN, y_KN), np.vdot(y_KN, y_KN)
    rest = max(float(yy - 2 * value * xy + value**2 * xx), 0.0)
    return Slope(value, low, high, math.sqrt(rest / n), math.sqrt(float(xx) / n))


def refuted(
    window: Window, rivals: Sequence[Rival | str], alpha: float, limit: float
) -> dict[Rival | str, bool]:
    """Which rivals another one excludes in this window.

    A rival is excluded if the interval of some slope is farther than `limit` from its own; one that
    leaves the engine as it was has no such limit.
    """

    def by(rival: Rival | str) -> float:
        return _EXACT if isinstance(rival, Rival) and rival.held is None else limit

    out = dict.fromkeys(rivals, False)
    for i, first in enumerate(rivals):
        for second in rivals[i + 1 :]:
            if out[first] and out[second]:
                continue
            slope = window.slope(first, second, alpha)
            if (slope.low, slope.high) == EVERYTHING:
                continue
            out[first] |= slope.excludes(1.0, by(first))
            out[second] |= slope.excludes(0.0, by(second))
    return out
