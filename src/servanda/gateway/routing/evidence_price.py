# E-values, their thresholds, and how near a cell is to a decision.
#
# Either of two alarm thresholds is sufficient for a diversion.  The plain one, enter_evidence x
# K, applies to the e-process since the state began: while all K cells are within their limits,
# one stay ends falsely with probability at most 1 / enter_evidence.  A good history counts
# against an alarm there, so the Shiryaev-Roberts statistic has a threshold of its own,
# enter_evidence x K x horizon: within `horizon` scored requests it is reached falsely with the
# same probability, whatever the history.
#
# The return threshold is leave_evidence for every cell, on requests of the probation alone.  It has
# no K: every cell has to reach it, so a slice with a cell beyond its limit returns only if the test
# of that one cell errs.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from servanda.gateway.routing.state import Rules, SliceState, Track, Transition, WatchedCell
from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.bets import log_mean_exp, mixed, weights_above, weights_below
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.interval import units_to_decide
from servanda.theory.stats.likelihood_ratio import RequestDraws, names

SUSPICIOUS = 1 / 4  # warning level: of a log threshold; above it the sample is larger
CALM = 1 / 16
LATELY = 100  # requests
_FEW = 0.05  # share of the requests: below it the effect on the mean is negligible


@dataclass(frozen=True)
class CellEvidence:
    """The log e-value of one cell and its threshold.

    Args:
        process: "since": all requests since the state began; "alarm": Shiryaev-Roberts;
            "back": the return test (within the limit).
        log_evidence, log_price: log e-value and log threshold, nats.
        near: log e-value as a fraction of the log threshold, 0 to 1.
    """

    cell: WatchedCell
    process: str
    log_evidence: float
    log_price: float
    near: float

    @property
    def paid(self) -> bool:
        return self.log_evidence >= self.log_price

    @property
    def excess(self) -> float:
        """Log e-value minus log threshold, nats."""
        return self.log_evidence - self.log_price


def log_prices(rules: Rules) -> tuple[float, float, float]:
    """Log thresholds of leaving, of leaving after a good history, and of the return, nats."""
    policy = rules.policy
    enter = shared(1 / policy.enter_evidence, rules.cells)
    alarm = shared(enter, policy.horizon)
    return log_price(enter), log_price(alarm), log_price(1 / policy.leave_evidence)


def add_request(
    track: Track, statistic: GroupRatio | RequestDraws, limit: float, chance: float
) -> Track:
    """The track after one more request.

    Args:
        statistic: of its tokens; without a prompt group, the request is not in the cell.
        chance: the probability with which the request was scored.
    """
    if not statistic.n:
        return track
    above, below = statistic.above_growth(limit), statistic.below_growth(limit)
    if not track.above:  # the first request
        nothing = (0.0,) * len(above), (0.0,) * len(below), (-math.inf,) * len(above)
        track = replace(track, above=nothing[0], below=nothing[1], alarm=nothing[2])
    unseen = statistic.missing / max(1, statistic.known + statistic.missing)
    late, late_tokens = track.late + statistic.total, track.late_tokens + statistic.known
    if late <= limit * late_tokens:
        late, late_tokens = 0.0, 0
    return Track(
        n=track.n + 1,
        missing=track.missing + statistic.missing,
        above=tuple((above + track.above).tolist()),
        below=tuple((below + track.below).tolist()),
        alarm=tuple((np.logaddexp(0.0, track.alarm) + above).tolist()),
        total=track.total + statistic.total,
        tokens=track.tokens + statistic.known,
        late=late,
        late_tokens=late_tokens,
        weighted=track.weighted + statistic.total / chance,
        weights=track.weights + statistic.known / chance,
        hidden=track.hidden + (unseen - track.hidden) / LATELY,
    )


def log_above(cell: WatchedCell, growth: Sequence[float]) -> float:
    """The log e-value of a cell from its components, nats.

    A sampler test has no limit: its alternatives have equal weights.
    """
    grown = np.array(growth)
    return (
        log_mean_exp(grown) if cell.refutes else mixed(grown, weights_above(cell.limit, cell.best))
    )


def evidence_above(rules: Rules, cell: WatchedCell, track: Track) -> CellEvidence:
    """The evidence that the cell exceeds its limit, of the process nearer its threshold."""
    price, dear, _ = log_prices(rules)
    if not track.above:
        return CellEvidence(cell, "since", 0.0, price, 0.0)
    since = log_above(cell, track.above)
    near = nearness_of(_near(since, price), cell.refutes)
    first = CellEvidence(cell, "since", since, price, near)
    alarm = log_above(cell, track.alarm)
    # at a mean equal to the limit S grows like the number of requests: no evidence
    usual = math.log(min(track.n, rules.policy.horizon))
    near = 1.0 if alarm >= dear else _near(alarm - math.log(track.n), dear - usual)
    second = CellEvidence(cell, "alarm", alarm, dear, nearness_of(near, cell.refutes))
    return max(first, second, key=lambda w: (w.paid, w.near))


def evidence_within(
    rules: Rules, cell: WatchedCell, track: Track, doubt: int | None = None
) -> CellEvidence:
    """The evidence that the cell is within its limit.

    Args:
        doubt: the alternative sampler to test against, where the cell tests the sampler; None:
            any.
    """
    price = log_prices(rules)[2]
    if not track.below:
        log_evidence = 0.0
    elif doubt is not None and doubt < len(track.below):
        log_evidence = track.below[doubt]
    elif cell.refutes:
        log_evidence = log_mean_exp(np.array(track.below))
    else:
        log_evidence = mixed(np.array(track.below), weights_below(cell.limit, cell.best))
    return CellEvidence(cell, "back", log_evidence, price, _near(log_evidence, price))


def requests_to_decide(rules: Rules, cell: WatchedCell, track: Track) -> int | None:
    """Projected number of further requests until the return test or the alarm decides.

    Of the two tests the one on whose side the mean is; None if its evidence does not grow.
    """
    if cell.refutes or not track.above:
        return None
    enter, _, leave = log_prices(rules)
    if track.total <= cell.limit * track.tokens:
        growth, weight, price = track.below, weights_below(cell.limit, cell.best), leave
    else:
        growth, weight, price = track.above, weights_above(cell.limit, cell.best), enter
    at = units_to_decide(np.array(growth), weight, track.n, price)
    return None if at is None else at - track.n


def doubts(slice_: SliceState, evidence: Sequence[CellEvidence]) -> dict[str, int]:
    """clause -> the best-matching alternative sampler, for each sampler test at its threshold."""
    return {w.cell.clause: _likeliest(slice_, w) for w in evidence if w.cell.refutes and w.paid}


def _likeliest(slice_: SliceState, evidence: CellEvidence) -> int:
    track = slice_.tracks[evidence.cell.clause]
    return int(np.argmax(track.alarm if evidence.process == "alarm" else track.above))


def failure_text(slice_: SliceState, evidence: CellEvidence) -> str:
    """The fault at an alarm, as words after the name of the cell."""
    if not evidence.cell.refutes:
        return "exceeds its limit"
    drawn = names()[_likeliest(slice_, evidence)]
    return f"fails: tokens are not sampled as infer reports, but closer to {drawn}"


def with_evidence(change: Transition, evidence: CellEvidence, slice_: SliceState) -> Transition:
    """The transition, with the evidence that decided it."""
    cell, track = evidence.cell, slice_.track(evidence.cell.clause)
    return replace(
        change,
        cell=cell.name,
        value=cell.low + cell.scale * (late_mean if evidence.process == "alarm" else mean)(track),
        limit=math.nan if cell.refutes else cell.low + cell.scale * cell.limit,
        log_evidence=evidence.log_evidence,
        log_price=evidence.log_price,
        n=track.n,
        keys=len(slice_.keys),
    )


def evidence_of(rules: Rules, slice_: SliceState) -> tuple[CellEvidence, ...]:
    """The evidence that each cell of a slice exceeds its limit, nearest to its threshold first."""
    evidence = (evidence_above(rules, c, slice_.track(c.clause)) for c in rules.on(slice_.name))
    return tuple(sorted(evidence, key=lambda w: (w.paid, w.near, w.excess), reverse=True))


def slowest(rules: Rules, slice_: SliceState) -> CellEvidence | None:
    """The cell of a slice that is farthest from passing the return test.

    A sampler test counts only if the slice was diverted for it.
    """
    evidence = [
        evidence_within(rules, c, slice_.track(c.clause), slice_.doubts.get(c.clause))
        for c in rules.on(slice_.name)
        if not c.refutes or c.clause in slice_.doubts
    ]
    return min(evidence, key=lambda w: w.near, default=None)


def mean(track: Track) -> float:
    """The inverse-probability estimate of the mean of x; NaN without a token."""
    return track.weighted / track.weights if track.weights > 0 else math.nan


def late_mean(track: Track) -> float:
    """The mean of x since it began to exceed the limit, or else over the whole track.

    For display with an alarm: it is selected by its outcome, so it has no guarantee.
    """
    return track.late / track.late_tokens if track.late_tokens else mean(track)


def excluded_note(rules: Rules, slice_: SliceState) -> str:
    """The note about requests that are excluded because one user sent more than a quarter."""
    requests = slice_.scored + slice_.passed
    if slice_.passed < _FEW * requests or not slice_.passed:
        return ""
    part = f"each user limited to {100 / rules.parts:.0f} % of the requests"
    return f", with {part} ({slice_.passed:,} of {requests:,} left out)"


def nearness_of(near: float, refutes: bool) -> float:
    """How near a cell is to a decision, by its fraction of the log threshold.

    Without a fault, the e-value of the sampler test fluctuates like the wealth in a fair game,
    instead of decreasing: the first half of its log threshold does not count.
    """
    return max(0.0, 2 * near - 1) if refutes else near


def _near(log_evidence: float, log_price: float) -> float:
    return min(1.0, max(0.0, log_evidence / log_price))
