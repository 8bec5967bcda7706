# What evidence costs, and how near a cell is to a decision.
#
# Leaving infer has two prices, and either is enough.  The plain one, enter_evidence x K, is
# paid by the evidence since the state began: with all K cells within their limits, one stay
# ends falsely with a chance of at most 1 / enter_evidence.  A good past stands against it, so
# Shiryaev and Roberts' sum has one of its own, enter_evidence x K x horizon: within `horizon`
# scored requests it is reached falsely with the same chance, and however long the past was.
#
# Coming back costs leave_evidence x K of every cell, on requests of the probation alone.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from servanda.gateway.routing.state import Rules, SliceState, Track, Transition, WatchedCell
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.likelihood_ratio import RequestDraws, names
from servanda.theory.stats.log_moment import log_mean_exp

SUSPICIOUS = 1 / 4  # of a price: more is sampled, so that it is soon paid or gone
CALM = 1 / 16
LATELY = 100  # requests
_FEW = 0.05  # of the requests: less makes hardly another mean, and is not worth a word


@dataclass(frozen=True)
class CellEvidence:
    """The evidence of one cell against one price.

    Args:
        process: "since", of all requests since the state began; "alarm", Shiryaev and Roberts';
            "back", that the cell is within its limit.
        log_evidence, log_price: nats.
        near: 0 of no evidence, 1 where the price is paid, at most 1.
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
        """Nats beyond the price; below it, less than 0."""
        return self.log_evidence - self.log_price


def add_request(
    track: Track, statistic: GroupRatio | RequestDraws, limit: float, chance: float
) -> Track:
    """The track after one more request.

    Args:
        statistic: of its tokens; without a prompt group, the request did not meet the cell.
        chance: with what probability the request was scored.
    """
    if not statistic.n:
        return track
    above, below = statistic.above_growth(limit), statistic.below_growth(limit)
    if len(track.above) != len(above):  # the first request, or bets of an earlier version
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


def evidence_above(rules: Rules, cell: WatchedCell, track: Track) -> CellEvidence:
    """The evidence that the cell is beyond its limit, of the process that is nearer its price."""
    policy = rules.policy
    price = math.log(policy.enter_evidence * rules.cells)
    if not track.above:
        return CellEvidence(cell, "since", 0.0, price, 0.0)
    since = log_mean_exp(np.array(track.above))
    near = nearness_of(_near(since, price), cell.refutes)
    first = CellEvidence(cell, "since", since, price, near)
    alarm = log_mean_exp(np.array(track.alarm))
    dear = price + math.log(policy.horizon)
    # a mean at its limit makes S grow like the number of requests: that much is no suspicion
    usual = math.log(min(track.n, policy.horizon))
    near = 1.0 if alarm >= dear else _near(alarm - math.log(track.n), dear - usual)
    second = CellEvidence(cell, "alarm", alarm, dear, nearness_of(near, cell.refutes))
    return max(first, second, key=lambda w: (w.paid, w.near))


def evidence_within(
    rules: Rules, cell: WatchedCell, track: Track, doubt: int | None = None
) -> CellEvidence:
    """The evidence that the cell is within its limit.

    Args:
        doubt: the way of drawing tokens that there is to be evidence against, where the cell
            refutes; None: any.
    """
    price = math.log(rules.policy.leave_evidence * rules.cells)
    if not track.below:
        log_evidence = 0.0
    elif doubt is not None and doubt < len(track.below):
        log_evidence = track.below[doubt]
    else:
        log_evidence = log_mean_exp(np.array(track.below))
    return CellEvidence(cell, "back", log_evidence, price, _near(log_evidence, price))


def doubts(slice_: SliceState, evidence: Sequence[CellEvidence]) -> dict[str, int]:
    """Of each cell that was refuted, the way of drawing tokens that has most of its evidence."""
    return {w.cell.clause: _likeliest(slice_, w) for w in evidence if w.cell.refutes and w.paid}


def _likeliest(slice_: SliceState, evidence: CellEvidence) -> int:
    track = slice_.tracks[evidence.cell.clause]
    return int(np.argmax(track.alarm if evidence.process == "alarm" else track.above))


def failure_text(slice_: SliceState, evidence: CellEvidence) -> str:
    """What is wrong where the price is paid, after the name of the cell."""
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
    """The evidence that each cell of a slice is beyond its limit, the nearest decision first."""
    evidence = (evidence_above(rules, c, slice_.track(c.clause)) for c in rules.on(slice_.name))
    return tuple(sorted(evidence, key=lambda w: (w.paid, w.near, w.excess), reverse=True))


def slowest(rules: Rules, slice_: SliceState) -> CellEvidence | None:
    """The cell of a slice that is farthest from showing that it is within its limit.

    One that refutes shows nothing, but where the slice left for it.
    """
    evidence = [
        evidence_within(rules, c, slice_.track(c.clause), slice_.doubts.get(c.clause))
        for c in rules.on(slice_.name)
        if not c.refutes or c.clause in slice_.doubts
    ]
    return min(evidence, key=lambda w: w.near, default=None)


def mean(track: Track) -> float:
    """The estimate of the mean of x, by inverse chance of being scored; NaN without a token."""
    return track.weighted / track.weights if track.weights > 0 else math.nan


def late_mean(track: Track) -> float:
    """The mean of x since it began to lie above the limit, or else over all of the track.

    For people, beside an alarm: it is picked by what it shows, and no certificate.
    """
    return track.late / track.late_tokens if track.late_tokens else mean(track)


def excluded_note(rules: Rules, slice_: SliceState) -> str:
    """Of which requests the means of a slice are, where one user asks for more than his part."""
    requests = slice_.scored + slice_.passed
    if slice_.passed < _FEW * requests or not slice_.passed:
        return ""
    part = f"each user limited to {100 / rules.parts:.0f} % of the requests"
    return f", with {part} ({slice_.passed:,} of {requests:,} left out)"


def nearness_of(near: float, refutes: bool) -> float:
    """How near a cell is to a decision, by the part of its price that there is.

    While nothing is wrong, the evidence of how tokens are drawn is that of a fair game, and not of
    a mean below its limit: the first half of a price is no suspicion.
    """
    return max(0.0, 2 * near - 1) if refutes else near


def _near(log_evidence: float, log_price: float) -> float:
    return min(1.0, max(0.0, log_evidence / log_price))
