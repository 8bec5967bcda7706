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

from servanda.gateway.routing.state import Rules, SliceState, Track, Transition, Watched
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.likelihood_ratio import RequestDraws, names
from servanda.theory.stats.log_moment import log_mean_exp

SUSPICIOUS = 1 / 4  # of a price: more is sampled, so that it is soon paid or gone
CALM = 1 / 16
LATELY = 100  # requests
_FEW = 0.05  # of the requests: less makes hardly another mean, and is not worth a word


@dataclass(frozen=True)
class Weighed:
    """The evidence of one cell against one price.

    Args:
        process: "since", of all requests since the state began; "alarm", Shiryaev and Roberts';
            "back", that the cell is within its limit.
        log_evidence, log_price: nats.
        near: 0 of no evidence, 1 where the price is paid, at most 1.
    """

    cell: Watched
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


def added(track: Track, one: GroupRatio | RequestDraws, limit: float, chance: float) -> Track:
    """The track after one more request.

    Args:
        one: of its tokens; without a prompt group, the request did not meet the cell.
        chance: with what probability the request was scored.
    """
    if not one.n:
        return track
    above, below = one.above_growth(limit), one.below_growth(limit)
    if len(track.above) != len(above):  # the first request, or bets of an earlier version
        nothing = (0.0,) * len(above), (0.0,) * len(below), (-math.inf,) * len(above)
        track = replace(track, above=nothing[0], below=nothing[1], alarm=nothing[2])
    unseen = one.missing / max(1, one.known + one.missing)
    late, late_tokens = track.late + one.total, track.late_tokens + one.known
    if late <= limit * late_tokens:
        late, late_tokens = 0.0, 0
    return Track(
        n=track.n + 1,
        missing=track.missing + one.missing,
        above=tuple((above + track.above).tolist()),
        below=tuple((below + track.below).tolist()),
        alarm=tuple((np.logaddexp(0.0, track.alarm) + above).tolist()),
        total=track.total + one.total,
        tokens=track.tokens + one.known,
        late=late,
        late_tokens=late_tokens,
        weighted=track.weighted + one.total / chance,
        weights=track.weights + one.known / chance,
        hidden=track.hidden + (unseen - track.hidden) / LATELY,
    )


def leaving(rules: Rules, cell: Watched, track: Track) -> Weighed:
    """The evidence that the cell is beyond its limit, of the process that is nearer its price."""
    policy = rules.policy
    price = math.log(policy.enter_evidence * rules.cells)
    if not track.above:
        return Weighed(cell, "since", 0.0, price, 0.0)
    since = log_mean_exp(np.array(track.above))
    first = Weighed(cell, "since", since, price, towards(_near(since, price), cell.refutes))
    alarm = log_mean_exp(np.array(track.alarm))
    dear = price + math.log(policy.horizon)
    # a mean at its limit makes S grow like the number of requests: that much is no suspicion
    usual = math.log(min(track.n, policy.horizon))
    near = 1.0 if alarm >= dear else _near(alarm - math.log(track.n), dear - usual)
    second = Weighed(cell, "alarm", alarm, dear, towards(near, cell.refutes))
    return max(first, second, key=lambda w: (w.paid, w.near))


def returning(rules: Rules, cell: Watched, track: Track, doubt: int | None = None) -> Weighed:
    """The evidence that the cell is within its limit.

    Args:
        doubt: the way of drawing tokens that there is to be evidence against, where the cell
            refutes; None: any.
    """
    price = math.log(rules.policy.leave_evidence * rules.cells)
    if not track.below:
        found = 0.0
    elif doubt is not None and doubt < len(track.below):
        found = track.below[doubt]
    else:
        found = log_mean_exp(np.array(track.below))
    return Weighed(cell, "back", found, price, _near(found, price))


def doubts(one: SliceState, found: Sequence[Weighed]) -> dict[str, int]:
    """Of each cell that was refuted, the way of drawing tokens that has most of its evidence."""
    return {w.cell.clause: _likeliest(one, w) for w in found if w.cell.refutes and w.paid}


def _likeliest(one: SliceState, found: Weighed) -> int:
    track = one.tracks[found.cell.clause]
    return int(np.argmax(track.alarm if found.process == "alarm" else track.above))


def broken(one: SliceState, found: Weighed) -> str:
    """What is wrong where the price is paid, after the name of the cell."""
    if not found.cell.refutes:
        return "is beyond its limit"
    drawn = names()[_likeliest(one, found)]
    return f"fails: tokens are not drawn as infer reports, but more as with {drawn}"


def decided(change: Transition, found: Weighed, one: SliceState) -> Transition:
    """The transition, with the evidence that decided it."""
    cell, track = found.cell, one.tracks.get(found.cell.clause, Track())
    return replace(
        change,
        cell=cell.name,
        value=cell.low + cell.scale * (late_mean if found.process == "alarm" else mean)(track),
        limit=math.nan if cell.refutes else cell.low + cell.scale * cell.limit,
        log_evidence=found.log_evidence,
        log_price=found.log_price,
        n=track.n,
        keys=len(one.keys),
    )


def weighed(rules: Rules, state: SliceState) -> tuple[Weighed, ...]:
    """The evidence that each cell of a slice is beyond its limit, the nearest decision first."""
    found = (leaving(rules, c, state.tracks.get(c.clause, Track())) for c in rules.on(state.name))
    return tuple(sorted(found, key=lambda w: (w.paid, w.near, w.excess), reverse=True))


def slowest(rules: Rules, state: SliceState) -> Weighed | None:
    """The cell of a slice that is farthest from showing that it is within its limit.

    One that refutes shows nothing, but where the slice left for it.
    """
    found = [
        returning(rules, c, state.tracks.get(c.clause, Track()), state.doubts.get(c.clause))
        for c in rules.on(state.name)
        if not c.refutes or c.clause in state.doubts
    ]
    return min(found, key=lambda w: w.near, default=None)


def mean(track: Track) -> float:
    """The estimate of the mean of x, by inverse chance of being scored; NaN without a token."""
    return track.weighted / track.weights if track.weights > 0 else math.nan


def late_mean(track: Track) -> float:
    """The mean of x since it began to lie above the limit, or else over all of the track.

    For people, beside an alarm: it is picked by what it shows, and no certificate.
    """
    return track.late / track.late_tokens if track.late_tokens else mean(track)


def left_out(rules: Rules, one: SliceState) -> str:
    """Of which requests the means of a slice are, where one user asks for more than his part."""
    asked = one.scored + one.passed
    if one.passed < _FEW * asked or not one.passed:
        return ""
    part = f"requests of which no user has more than {1 / rules.parts:.0%}"
    return f", over {part} ({one.passed:,} of {asked:,} were left out)"


def towards(near: float, refutes: bool) -> float:
    """How near a cell is to a decision, by the part of its price that there is.

    While nothing is wrong, the evidence of how tokens are drawn is that of a fair game, and not of
    a mean below its limit: the first half of a price is no suspicion.
    """
    return max(0.0, 2 * near - 1) if refutes else near


def _near(log_evidence: float, log_price: float) -> float:
    return min(1.0, max(0.0, log_evidence / log_price))
