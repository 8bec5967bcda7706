# The result of one sync: whether each engine follows, and otherwise why not, in numbers and in a
# sentence; and the scores of earlier syncs: all of the last ones, and a few of each age before.

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from servanda.judgement.verdict import EXIT_CODES
from servanda.report.cell_text import GLYPH
from servanda.report.format import count
from servanda.rl.follow.stale_rows import StaleRows, stale_rows
from servanda.rl.sync_drill.response_slope import RESOLUTION
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.sampling import Floats, Ints
from servanda.theory.stats.alpha import look_alpha, shared
from servanda.theory.stats.slope import EVERYTHING, slope_interval, slope_of, unit_sums
from servanda.traces.serialization import to_plain

DENSE = 32  # syncs that are all kept


@dataclass(frozen=True)
class Scores:
    """The scores after one sync.

    Args:
        look: its number, from 0 on.
        version: number of updates of the trainer.
        train_N: the trainer's logprobs, nats; NaN for missing ones.
        infer: replica -> the same tokens' logprobs by that engine.
        violated: the engines that did not follow then.
        again: engine -> two earlier syncs, between which its scores were discarded, because it
            follows again.
    """

    look: int
    version: int
    train_N: Floats
    infer: Mapping[str, Floats]
    violated: tuple[str, ...] = ()
    again: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        return {
            "look": self.look,
            "version": self.version,
            "train": _encoded(self.train_N),
            "infer": {name: _encoded(infer_N) for name, infer_N in self.infer.items()},
            "violated": [*self.violated],
            "again": {name: [*looks] for name, looks in self.again.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Scores:
        infer = {str(name): _array(text) for name, text in plain["infer"].items()}
        return cls(
            int(plain["look"]),
            int(plain["version"]),
            _array(plain["train"]),
            infer,
            tuple(map(str, plain["violated"])),
            {str(name): (int(a), int(b)) for name, (a, b) in plain["again"].items()},
        )


@dataclass
class ScoreHistory:
    """Scores by the number of their sync; the first ones are never dropped."""

    kept: dict[int, Scores] = field(default_factory=dict)
    looks: int = 0

    def add(self, scores: Scores) -> None:
        self.kept[scores.look] = scores
        for name, (since, first) in scores.again.items():
            for look, old in self.kept.items():
                if since < look < first:
                    infer = {n: infer_N for n, infer_N in old.infer.items() if n != name}
                    self.kept[look] = replace(old, infer=infer)
        self.looks = scores.look + 1
        self.kept = {look: s for look, s in self.kept.items() if is_kept(look, scores.look)}

    def forget_from(self, version: int) -> int:
        """Discard the scores of a version and later ones, which a run that went back repeats."""
        later = [look for look, s in self.kept.items() if s.version >= version]
        for look in later:
            del self.kept[look]
        return len(later)


def is_kept(look: int, newest: int) -> bool:
    """Whether a sync's scores are kept: the sparser the older, and the first always.

    >>> [look for look in range(101) if is_kept(look, 100) and look < 64]
    [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62]
    """
    age = newest - look
    return age < DENSE or look % (1 << (2 * age // DENSE).bit_length() - 1) == 0


def ages(looks: Iterable[int], newest: int) -> list[int]:
    """Reference syncs: the oldest of each octave of age; [newest - 1, newest - 2, ... 0].

    >>> ages(range(11), 10)
    [9, 7, 3, 0]
    """
    oldest: dict[int, int] = {}
    for look in sorted(looks, reverse=True):
        if look < newest:
            oldest[(newest - look).bit_length()] = look
    return [*oldest.values()]


def _encoded(values_N: Floats) -> str:
    return base64.b64encode(values_N.astype("<f4").tobytes()).decode()


def _array(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float64)


# Rivals: explanations of an engine's scores, each a claim about the weights that it holds.
#
# A rival predicts the engine's change since a reference sync.  Two of them are compared by the
# slope of the engine's change, minus the prediction of the second, on the difference of their
# predictions: 1 if the first is true, 0 if the second is, and in between or outside if neither is.
#
# Axes: K syncs of a window, N scored tokens.


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
        kind: the cause that is asked about; of "late", one that began late is no such pattern.
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
        floor_nats: the smallest root of the mean square of engine minus trainer over all syncs:
            what the rounding of both sides does at equal weights.
    """

    kept: Mapping[int, Scores]
    since: int
    newest: int
    start_U: Ints
    replica: str
    parts: Mapping[str, Floats]
    floor_nats: float
    stacked: int = STACKED

    def slope(self, first: Rival | str, second: Rival | str, alpha: float) -> Slope:
        """The slope of two rivals; a text is a group of weights that stays at the first sync."""
        looks = self._looks(first, second)
        if not looks:
            return Slope()
        second_KN = self._change(second, looks)
        x_KN = self._change(first, looks) - second_KN
        y_KN = self._of_engine(looks) - second_KN
        n = x_KN.size
        if not math.isfinite(float(x_KN.sum() + y_KN.sum())):  # some scores are missing
            known_N = np.isfinite(x_KN + y_KN).all(axis=0)
            x_KN, y_KN = np.where(known_N, x_KN, 0.0), np.where(known_N, y_KN, 0.0)
            n = int(known_N.sum()) * len(looks)
        return _slope(x_KN, y_KN, self.start_U, alpha, n)

    @property
    def explained(self) -> bool:
        """Whether rounding may be all: at no sync are both sides much farther apart than at one."""
        gaps = (gap_nats(self.kept[look], self.replica) for look in self._looks())
        return max(gaps, default=0.0) <= _ROUNDING * self.floor_nats

    def stale_rows(self) -> StaleRows | None:
        """Rows that stay as they were at the reference; None without a later sync."""
        looks = self._looks()
        if not looks:
            return None
        x_KN, y_KN = self._change(RIVALS[0], looks), self._of_engine(looks)
        known_KN = np.isfinite(x_KN + y_KN)
        x_KN, y_KN = np.where(known_KN, x_KN, 0.0), np.where(known_KN, y_KN, 0.0)
        return stale_rows(x_KN, y_KN, self.start_U, self.floor_nats)

    def rest_nats(self, rival: Rival | str) -> float:
        """Root of the mean square of the engine's change that a rival leaves; NaN: unknown."""
        looks = self._looks(rival, rival)
        if not looks:
            return math.nan
        rest_KN = self._of_engine(looks) - self._change(rival, looks)
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

    def _of_engine(self, looks: Sequence[int]) -> Floats:
        """The change of the engine since the reference, [K, N]."""
        there_KN = np.stack([self.kept[look].infer[self.replica] for look in looks])
        return there_KN - self.kept[self.since].infer[self.replica]

    def _change(self, rival: Rival | str, looks: Sequence[int]) -> Floats:
        """The same as a rival predicts it."""
        if isinstance(rival, str):
            return (self.parts[rival] - self.kept[self.since].train_N)[None]
        if rival.held is None:
            return np.zeros((len(looks), self.kept[self.since].train_N.size))
        before = self.kept[rival.held(self.since)].train_N
        return np.stack([self.kept[rival.held(look)].train_N for look in looks]) - before


def gap_nats(scores: Scores, replica: str) -> float:
    """Root of the mean square of engine minus trainer after a sync; infinite without scores."""
    gap_N = scores.infer[replica] - scores.train_N
    known = gap_N[np.isfinite(gap_N)]
    return math.sqrt(float(np.mean(known**2))) if known.size else math.inf


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


Outcome = Literal["holds", "violated", "inconclusive", "error"]

# noise floors by which rounding may set both sides apart.  Rows share the rounding of weights: on
# real kernels the sum over rows spreads up to twice as far as independent rows would let it.
_ROUNDING = 1.25
# what a cause may leave of the engine's change, in noise floors: the rounding of two scores.  A
# mixture of two versions leaves more, if they differ by 1.2 noise floors or more.
_FITS = _ROUNDING * math.sqrt(2)
_SHAPE = 0.35  # what a factor may leave of the part that it explains
# distances of both sides that no cause has to explain: more of the best sync's than an engine comes
# to that rounds to 8 bits from its first sync on (9 times bfloat16's, measured), and in nats, for
# an engine may begin with the trainer's own bits
_FAR, _FAR_NATS = 12.0, 0.5
_NO_SCORES = 0.2  # share of the tokens that a model without a number for them is no accident of
_STACKS = (1, 2, 4, 8)  # last syncs at which an engine follows again
_PASSING = 0.1  # share of alpha for patterns that pass within a window, at most STACKED ** 2
_CYCLES = 4  # syncs after the reference that show a pattern in time

NEVER, STOPPED, LATE, DROPPED = "never_synced", "stopped", "late", "dropped"
SCALED, PARTS, ROWS = "scaled", "part", "part_of_rows"
UNDECIDED, UNEXPLAINED = "undecided", "unexplained"


@dataclass(frozen=True)
class ReplicaFollow:
    """The conclusion about one engine.

    Args:
        outcome: holds, violated, inconclusive or error.
        slope: of its change on the trainer's, over the syncs after `since`.
        since: version of the trainer at the reference sync; None: no slope yet.
        cause: never_synced, stopped, late, dropped, scaled, part, part_of_rows; undecided if
            several are left, unexplained if none is; "" if it follows, or not enough is known.
        detail: the syncs of `late`, the version of `stopped`, the group of `part`, the rows of
            `part_of_rows`, the rivals that are left of `undecided`.
        needs: further syncs until a decision, about; None: unknown, or decided.
        missing: tokens without a score of either side at this sync.
        again: two earlier syncs, if it follows again: the reference, and the first at which it did.
        floor_nats: smallest root of the mean square of engine minus trainer at one sync.
        explained: inconclusive, because the slope is not 1 and rounding may be the reason.
    """

    outcome: Outcome
    slope: Slope = field(default_factory=Slope)
    since: int | None = None
    cause: str = ""
    detail: str = ""
    needs: int | None = None
    missing: int = 0
    again: tuple[int, int] | None = None
    floor_nats: float = math.nan
    explained: bool = False


@dataclass(frozen=True)
class Question:
    """How an engine is judged.

    Args:
        kept: number of a sync -> its scores; start_U: index of the first token of each row.
        alpha: error probability of this engine over the whole run.
        limit: largest |slope - 1| of an engine that follows.
        parts: group -> the trainer's scores with this group as at the first sync, [N].
    """

    kept: Mapping[int, Scores]
    start_U: Ints
    alpha: float
    limit: float
    parts: Mapping[str, Floats]

    def about(self, replica: str) -> ReplicaFollow:
        """The conclusion about a replica at the newest sync."""
        newest = max(self.kept)
        scores = self.kept[newest]
        train_N = scores.train_N
        infer_N = scores.infer.get(replica, np.full_like(train_N, np.nan))
        missing = int((~np.isfinite(train_N + infer_N)).sum())
        known = [look for look, s in self.kept.items() if replica in s.infer]
        before_N = self.kept[known[0]].infer[replica]
        lost = int((np.isfinite(before_N) & np.isnan(infer_N)).sum())
        if missing == train_N.size or lost > _NO_SCORES * train_N.size:
            side = "trainer" if np.isnan(train_N).all() else "engine"
            detail = f"the {side} gives no logprob of {missing:,} of {train_N.size:,} probe tokens"
            return ReplicaFollow("error", detail=detail, missing=missing)
        floor = max(RESOLUTION, min(gap_nats(self.kept[look], replica) for look in known))
        windows = [
            Window(self.kept, since, newest, self.start_U, replica, self.parts, floor)
            for since in ages(known, newest)
        ]
        if not windows:
            return ReplicaFollow("inconclusive", missing=missing)
        found = _Windows(self, windows, newest, missing).conclusion()
        return replace(found, floor_nats=floor)


class _Windows:
    def __init__(
        self, question: Question, windows: Sequence[Window], newest: int, missing: int
    ) -> None:
        self.question, self.windows, self.missing = question, windows, missing
        self.newest = newest
        rivals = len(RIVALS) + MISSED + len(question.parts) + 1  # and rows that are stale
        # a true rival is excluded in no window and by no other, but for this probability
        was_red = any(windows[0].replica in s.violated for s in question.kept.values())
        share = shared(look_alpha(question.alpha, newest), len(windows))
        share = shared(share, 1 + len(_STACKS) * was_red)
        self.alpha = shared((1 - _PASSING) * share, rivals - 1)
        self.alpha_passing = shared(_PASSING * share, STACKED**2)
        self.follows, self.frozen = RIVALS[0], RIVALS[1]
        # an engine that follows again is not to be judged from a sync at which it did not
        kept = question.kept
        self.sound = [w for w in windows if w.replica not in kept[w.since].violated]
        self.slopes = {
            window.since: {
                rival: window.slope(self.follows, rival, self.alpha) for rival in self._of(window)
            }
            for window in windows
        }

    def _of(self, window: Window) -> list[Rival | str]:
        """The rivals of following, in a window."""
        parts = self.question.parts if window.since == 0 else ()
        return [*RIVALS[1:], *missed(self.newest, window.since), *parts]

    def conclusion(self) -> ReplicaFollow:
        """Follows, or a cause, or undecided."""
        limit = self.question.limit
        outside = [
            window
            for window in self.windows
            if any(slope.excludes(1.0, limit) for slope in self.slopes[window.since].values())
        ]
        red = [window for window in outside if not window.explained]
        if any(window in self.sound for window in red):
            cause, detail, since = self._cause(red)
        else:
            cause, detail, since = self._rows()
            if not cause:
                cause, detail, since = self._far()
        if cause:
            slope = self.slopes[since][self.frozen]
            found = self._with("violated", slope, since, cause=cause, detail=detail)
            return self._again() or found
        slopes = {window.since: self.slopes[window.since] for window in self.sound}
        since = min(slopes, key=lambda look: _width(slopes[look][self.frozen]))
        slope = slopes[since][self.frozen]
        excluded = all(
            any(of[rival].excludes(0.0, limit) for of in slopes.values()) for rival in RIVALS[1:]
        )
        inside = [look for look, of in slopes.items() if of[self.frozen].inside(limit)]
        if excluded and inside:
            since = min(inside)
            return self._with("holds", slopes[since][self.frozen], since)
        found = self._with("inconclusive", slope, since, needs=self._needs(slope, since))
        return replace(found, explained=bool(outside) and not red)

    def _again(self) -> ReplicaFollow | None:
        """Follows again: at the last syncs, relative to one at which it was not violated."""
        limit, known = self.question.limit, self.question.kept
        for window in self.sound:
            looks = [n for n, s in known.items() if n > window.since and window.replica in s.infer]
            for stacked in _STACKS:
                last = replace(window, stacked=stacked)
                slopes = [last.slope(self.follows, r, self.alpha) for r in self._of(window)]
                if any(slope.excludes(1.0, limit) for slope in slopes):
                    break
                others = slopes[: len(RIVALS) - 1]
                if slopes[0].inside(limit) and all(s.excludes(0.0, limit) for s in others):
                    found = self._with("holds", slopes[0], window.since)
                    return replace(found, again=(window.since, looks[-stacked:][0]))
        return None

    def _with(
        self,
        outcome: Outcome,
        slope: Slope,
        since: int,
        *,
        cause: str = "",
        detail: str = "",
        needs: int | None = None,
    ) -> ReplicaFollow:
        known = math.isfinite(slope.high)
        version = self.question.kept[since].version if known or cause else None
        return ReplicaFollow(outcome, slope, version, cause, detail, needs, self.missing)

    def _rows(self) -> tuple[str, str, int]:
        """(cause, detail, reference sync) of rows that are stale; empty texts if none are.

        All rows of an engine that holds an earlier version for a while are stale at its syncs, so
        no such pattern may fit.
        """
        for window in sorted(self.sound, key=lambda window: window.since):
            rows, fits = window.stale_rows(), _FITS * window.floor_nats
            if rows is None or rows.p >= self.alpha or rows.rest_nats > fits:
                continue
            others = [*self._of(window), *passing(window.since, self.newest, ROWS)]
            if not any(window.rest_nats(other) <= fits for other in others):
                return ROWS, str(rows), window.since
        return "", "", 0

    def _far(self) -> tuple[str, str, int]:
        """(cause, detail, reference sync) of an engine that is much farther off than it was."""
        window = self.windows[-1]
        gaps = {
            look: gap_nats(scores, window.replica)
            for look, scores in window.kept.items()
            if window.replica in scores.infer
        }
        gap, best = gaps[self.newest], min(gaps, key=lambda look: gaps[look])
        if not gap > max(_FAR * window.floor_nats, _FAR_NATS):
            return "", "", 0
        detail = (
            f"it is {gap:.2g} nats from the trainer, and was {gaps[best]:.2g} from it at version "
            f"{window.kept[best].version}"
        )
        return UNEXPLAINED, detail, window.since

    def _cause(self, red: Sequence[Window]) -> tuple[str, str, int]:
        """(cause, detail, reference sync): of the longest window in which one rival is left."""
        limit = self.question.limit
        fits = _FITS * red[0].floor_nats
        best = min(red, key=lambda window: _width(self.slopes[window.since][self.frozen]))
        several = ""
        for window in sorted(red, key=lambda window: window.since):
            rivals = [self.follows, *self._of(window)]
            out = refuted(window, rivals, self.alpha, limit)
            left = [rival for rival in rivals if not out[rival]]
            fitting = [rival for rival in left if window.rest_nats(rival) <= fits]
            if len(left) == len(fitting) == 1:
                named = _named(left[0], window, self.newest - window.since)
                if named and self._lasts(left[0], named[0], window):
                    return (*named, window.since)
            slope = self.slopes[window.since][self.frozen]
            shape = max(fits, _SHAPE * abs(slope.value - 1) * slope.moved_nats)
            shown = self.newest - window.since >= _CYCLES
            # an engine that catches up changes more than the trainer, but only once
            steady = all(of[self.frozen].high >= slope.low for of in self.slopes.values())
            if shown and not left and slope.low > 1 + limit and slope.rest_nats <= shape and steady:
                return SCALED, "", window.since
            if window is best:
                several = ", ".join(dict.fromkeys(map(_text, fitting)))
        rows = self._rows()
        if rows[0]:
            return rows
        return (UNDECIDED, several, best.since) if several else (UNEXPLAINED, "", best.since)

    def _lasts(self, rival: Rival | str, cause: str, window: Window) -> bool:
        """Whether a pattern in time excludes every one that passes within the window."""
        if cause not in (LATE, DROPPED):
            return True
        return all(
            window.slope(rival, other, self.alpha_passing).excludes(0.0, self.question.limit)
            for other in passing(window.since, self.newest, cause)
        )

    def _needs(self, slope: Slope, since: int) -> int | None:
        """Further syncs until the interval fits into the limit, if the trainer moves on as it did
        and the slope stays.
        """
        spare = self.question.limit - abs(slope.value - 1)
        width = _width(slope) / 2
        if not math.isfinite(width) or spare <= 0:
            return None
        looks = self.newest - since
        return max(1, math.ceil(looks * (width / spare - 1)), _CYCLES - self.newest)


def _named(rival: Rival | str, window: Window, looks: int) -> tuple[str, str] | None:
    """The cause and its detail; None if the window is too short to show it."""
    if isinstance(rival, str):
        return PARTS, rival
    if rival.name == FROZEN:
        version = window.kept[window.since].version
        return (NEVER, "") if window.since == 0 else (STOPPED, str(version))
    if looks < _CYCLES:
        return None
    kind, _, detail = rival.name.partition(" ")
    if kind == STOPPED:
        return STOPPED, str(window.kept[int(detail)].version)
    return (LATE, detail) if kind == LATE else (DROPPED, "")


def _text(rival: Rival | str) -> str:
    """A rival that is left, in words."""
    if isinstance(rival, str):
        return f"{rival} does not arrive"
    kind, _, by = rival.name.partition(" ")
    if kind == LATE:
        return f"late by {by}"
    return "every other sync is dropped" if kind == DROPPED else "the syncs have stopped"


def _width(slope: Slope) -> float:
    return slope.high - slope.low


def worst_of(replicas: Mapping[str, ReplicaFollow]) -> str:
    """The replica that decides: by outcome, then by the distance of its slope from 1."""
    order: tuple[Outcome, ...] = ("violated", "error", "inconclusive", "holds")

    def place(name: str) -> tuple[int, float]:
        found = replicas[name]
        value = found.slope.value
        return order.index(found.outcome), -abs(value - 1) if math.isfinite(value) else 0.0

    return min(replicas, key=place)


STALE_REPLICAS = "stale_replicas"
PREFIX = "servanda/follow/"


@dataclass(frozen=True)
class FollowStep:
    """Whether the engines follow the trainer, after one sync.

    Args:
        version: number of updates of the trainer.
        replicas: engine -> the conclusion about it.
        tokens: probe tokens.
        notes: remarks, such as scores that were discarded.
    """

    version: int
    replicas: Mapping[str, ReplicaFollow]
    tokens: int
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> ReplicaFollow:
        """The conclusion that decides: by outcome, then by the distance of the slope from 1."""
        return self.replicas[worst_of(self.replicas)]

    @property
    def outcome(self) -> Outcome:
        return self.worst.outcome

    @property
    def exit_code(self) -> int:
        """0 holds, 1 violated, 3 inconclusive, 4 error."""
        return EXIT_CODES[self.outcome]

    @property
    def slope(self) -> float:
        """The slope of the engine that decides; NaN if it is not known."""
        return self.worst.slope.value

    @property
    def interval(self) -> tuple[float, float]:
        """Its interval, valid at all syncs of the run at once; infinite if nothing is known."""
        return self.worst.slope.low, self.worst.slope.high

    @property
    def cause(self) -> str:
        """The cause, which all violated engines share; "" if none is violated.

        never_synced, stopped, late, dropped, scaled, part, undecided, unexplained; stale_replicas
        if only some of several engines are violated.
        """
        causes = {found.cause for found in self._violated.values()}
        if not causes:
            return ""
        if len(self._violated) < len(self.replicas):
            return STALE_REPLICAS
        return causes.pop() if len(causes) == 1 else UNEXPLAINED

    @property
    def _violated(self) -> dict[str, ReplicaFollow]:
        return {n: found for n, found in self.replicas.items() if found.outcome == "violated"}

    @property
    def sentence(self) -> str:
        """The conclusion in words."""
        if self._violated:
            found = next(iter(self._violated.values()))
            if self.cause != STALE_REPLICAS:
                return _sentence(found)
            these = ", ".join(self._violated)
            return (
                f"{len(self._violated)} of {count(len(self.replicas), 'replica')} ({these}): "
                + (
                    _sentence(found)
                    if len({f.cause for f in self._violated.values()}) == 1
                    else "they do not follow"
                )
            )
        return _sentence(self.worst)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers to log; those that were not measured are absent."""
        found = self.worst
        numbers = {
            "exit_code": float(self.exit_code),
            "slope": found.slope.value,
            "low": found.slope.low,
            "high": found.slope.high,
            "moved_nats": found.slope.moved_nats,
            "missing_tokens": float(sum(f.missing for f in self.replicas.values())),
        }
        if len(self.replicas) > 1:
            numbers["replicas_violated"] = float(len(self._violated))
        return {PREFIX + name: n for name, n in numbers.items() if math.isfinite(n)}

    def to_plain(self) -> dict[str, Any]:
        """Plain data for a state file."""
        return to_plain(
            {
                "version": self.version,
                "outcome": self.outcome,
                "slope": self.slope,
                "low": self.interval[0],
                "high": self.interval[1],
                "since": self.worst.since,
                "cause": self.cause,
                "sentence": self.sentence,
                "replicas": {n: f.outcome for n, f in self.replicas.items()},
            }
        )

    @property
    def numbers(self) -> str:
        """The slope with its interval, and the versions that it covers; "" if not known."""
        found = self.worst
        if not math.isfinite(found.slope.high):
            return ""
        return (
            f"slope {found.slope.value:.2f} [{found.slope.low:.2f}, {found.slope.high:.2f}] "
            f"since version {found.since}"
        )

    def __str__(self) -> str:
        lines = [f"{GLYPH[self.outcome]} version {self.version}: {self.sentence}"]
        found = self.worst
        if self.numbers:
            lines.append(
                f"  {self.numbers}; moved {found.slope.moved_nats:.2g} nats, unexplained "
                f"{found.slope.rest_nats:.2g} nats, {self.tokens:,} tokens"
            )
        if found.outcome in _ASSUMES:
            lines.append(f"  assumes: {_ASSUMES[found.outcome]}")
        missing = sum(f.missing for f in self.replicas.values())
        if missing:
            lines.append(f"  {count(missing, 'score')} missing")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


_ASSUMES: Mapping[Outcome, str] = {
    "holds": ASSUMPTIONS["independent_rows"].text,
    "violated": f"{ASSUMPTIONS['load'].text}: rounding is at most {_ROUNDING:g} times that of the "
    "best sync",
}


def _sentence(found: ReplicaFollow) -> str:
    if found.outcome == "error":
        return f"{found.detail}: weights that are NaN, or a request that failed"
    if found.outcome == "holds":
        return "the engine follows the trainer"
    if found.outcome == "inconclusive":
        if not found.slope.moved_nats:
            return "the trainer's scores have not changed yet"
        if found.explained:
            return (
                "undecided, for the engine may round by itself: both sides are "
                f"{found.floor_nats:.2g} nats apart at best, and the trainer has moved by "
                f"{found.slope.moved_nats:.2g}"
            )
        if found.slope.rest_nats > _FITS * found.floor_nats:
            return (
                f"undecided: {found.slope.rest_nats:.2g} nats of the engine's change are not the "
                f"trainer's, and rounding makes {found.floor_nats:.2g}"
            )
        needs = "" if found.needs is None else f": about {count(found.needs, 'more sync')}"
        return f"not enough movement yet{needs}"
    return {
        NEVER: "no sync has reached the engine, while the trainer has changed",
        STOPPED: f"the engine holds the weights of version {found.detail}: no later sync arrived",
        LATE: f"the engine is late by {found.detail}: it holds the weights of an earlier sync",
        DROPPED: "every other sync does not reach the engine",
        SCALED: f"the engine changes by {found.slope.value:.2f} times the trainer's change",
        PARTS: f"part of the weights does not reach the engine: {found.detail}",
        ROWS: f"part of the rows is answered as at version {found.since}: {found.detail}",
        UNDECIDED: f"the engine does not follow; further syncs decide between: {found.detail}",
    }.get(
        found.cause,
        f"the engine does not follow: {found.detail}; no known cause explains this"
        if found.detail
        else "the engine does not follow, and no known cause explains its scores",
    )
