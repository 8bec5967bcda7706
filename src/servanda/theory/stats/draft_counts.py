# Counts of drafts, and of their tokens that the target of speculation accepted.
#
# With exact rejection sampling a draft's next token is accepted with probability 1 - TV(draft,
# target) in its context.  One draft is one unit: its x is the number of its accepted tokens,
# divided by the longest draft, so that x is in [0, 1] and LogMoment's process applies.  With counts
# by depth each x is known; without them x counts as 0 or 1, which of all x with this mean gives the
# least evidence, because log(1 + t x) is concave.
#
# Axes: D depths, from the first token of a draft on.

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from servanda.errors import EvidenceError
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.bets import NEG, POS, Floats
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import Process


@dataclass(frozen=True)
class DraftCounts(Process):
    """Counts of drafts over an interval; `+` adds other engines, or a later interval.

    Args:
        drafts: number of drafts that the target verified.
        proposed: number of their tokens.
        accepted: number of those that the target accepted.
        by_depth: drafts of which at least the first 1, 2, ... tokens were accepted; () if unknown.
        longest: tokens of the longest draft; by default the number of depths, otherwise
            proposed / drafts rounded up, which is right if all drafts have one length.

    Raises:
        EvidenceError: the counts contradict each other.

    >>> counts = DraftCounts(drafts=100, proposed=300, accepted=150, by_depth=(80, 50, 20))
    >>> counts.mean, counts.shares
    (0.5, (0.8, 0.5, 0.2))
    """

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    by_depth: tuple[int, ...] = ()
    longest: int = 0

    def __post_init__(self) -> None:
        if not self.longest:
            each = math.ceil(self.proposed / self.drafts) if self.drafts else 0
            object.__setattr__(self, "longest", len(self.by_depth) or each)
        down = (self.drafts, *self.by_depth, 0)
        right = (
            0 <= self.accepted <= self.proposed <= self.drafts * self.longest
            and all(a >= b for a, b in pairwise(down))
            and (not self.by_depth or sum(self.by_depth) == self.accepted)
            and len(self.by_depth) <= self.longest
        )
        if not right:
            raise EvidenceError(
                f"counts of drafts contradict each other: {self.drafts} drafts of at most "
                f"{self.longest} tokens, {self.proposed} proposed, {self.accepted} accepted, by "
                f"depth {self.by_depth}",
                hint="pass the increase of each counter over the same interval",
            )

    def __add__(self, other: DraftCounts) -> DraftCounts:
        if not self.drafts or not other.drafts:
            return self if self.drafts else other
        known = self.by_depth and other.by_depth
        pairs = zip_longest(self.by_depth, other.by_depth, fillvalue=0) if known else ()
        return DraftCounts(
            self.drafts + other.drafts,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            tuple(a + b for a, b in pairs),
            max(self.longest, other.longest),
        )

    @property
    def n(self) -> int:  # type: ignore[override]
        """Number of units."""
        return self.drafts

    @property
    def mean(self) -> float:
        """Accepted tokens / proposed tokens; NaN without any."""
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def shares(self) -> tuple[float, ...]:
        """Per depth, the share of drafts that were accepted so far, [D]; () if unknown."""
        return tuple(count / self.drafts for count in self.by_depth) if self.drafts else ()

    @property
    def first(self) -> DraftCounts:
        """The first token of each draft alone; no draft without counts by depth."""
        if not self.by_depth:
            return DraftCounts()
        return DraftCounts(self.drafts, self.drafts, self.by_depth[0], self.by_depth[:1])

    def below_growth(self, limit: float) -> Floats:
        return self._growth(NEG, limit)

    def above_growth(self, limit: float) -> Floats:
        return self._growth(POS, limit)

    def _growth(self, bets: Floats, limit: float) -> Floats:
        if not self.drafts:
            return np.zeros(len(bets))
        if self.by_depth:
            x_D = np.arange(1, len(self.by_depth) + 1) / self.longest
            count_D = -np.diff([*self.by_depth, 0])
        else:
            x_D, count_D = np.ones(1), np.array([self.accepted / self.longest])
        # the limit is a share of the proposed tokens, and x one of the longest draft
        filled = self.proposed / (self.drafts * self.longest)
        at_limit: Floats = self.drafts * np.log1p(bets * limit * filled)
        return np.log1p(bets[:, None] * x_D) @ count_D.astype(np.float64) - at_limit


def fallen(before: DraftCounts, now: DraftCounts, alpha: float) -> float:
    """By how much the acceptance is certainly lower now, at least; 0 if that is not shown.

    Args:
        alpha: error probability; each of the two bounds has half of it.
    """
    (low, _), (_, high) = (interval(counts, shared(alpha, 2)) for counts in (before, now))
    return max(0.0, low - high) if before.n and now.n else 0.0


def moved(before: DraftCounts, now: DraftCounts, alpha: float) -> float:
    """A lower bound of the mean TV between the targets of two intervals; 0 if none is shown.

    A first token is accepted with probability 1 - TV(draft, target), and TV is a metric, so that
    |change of acceptance| <= TV(target, target).  This assumes one draft model, contexts of one
    distribution, and exact rejection sampling.

    Args:
        alpha: error probability; each of the two intervals has half of it, and each end a quarter.
    """
    if not (before.by_depth and now.by_depth):
        return 0.0
    (low, high), (low_now, high_now) = (
        interval(counts.first, shared(alpha, 4)) for counts in (before, now)
    )
    return max(0.0, low - high_now, low_now - high)
