# The state machine of routing.
#
# All functions are pure: time is an argument, and the same scores and evaluations in the same order
# give the same state.  `absorb` only adds evidence; `advance` moves slices, and `pin` is the action
# of a person.
#
# Each slice goes at most one step an evaluation, by its evidence, the clock, and what is measured.
#
#     active <-> suspect -> quarantined -> probation -> recovering -> active
#                                ^-------------'------------'
#
# A circuit breaker with a re-test and a ramp: quarantined is open, probation half-open.  It opens
# on evidence, distinct users, a rule and capacity at stable; a missing condition is reported once.
# It closes after a hold time, a re-test of every cell and a ramp; a relapse doubles the hold time.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from servanda.contract.model import WHOLE
from servanda.errors import ContractError
from servanda.gateway.routing.evidence_price import (
    CALM,
    LATELY,
    SUSPICIOUS,
    CellEvidence,
    add_request,
    doubts,
    evidence_of,
    excluded_note,
    failure_text,
    slowest,
    with_evidence,
)
from servanda.gateway.routing.model import AWAY, Pin, Status
from servanda.gateway.routing.snapshot import acts, cuts
from servanda.gateway.routing.state import (
    RAMP,
    RoutingState,
    Rules,
    Score,
    SliceState,
    Track,
    TrafficFacts,
    Transition,
    WatchedCell,
    status_text,
    without_evidence,
)
from servanda.registry import did_you_mean
from servanda.report.format import exact_percent

_AT_LEAST = 2  # requests that every user may contribute
_RUNS = 32  # promotions whose last revision is kept


def begin(rules: Rules, *, now: float) -> RoutingState:
    """Every slice active and without evidence."""
    slices = {name: SliceState(name, since=now) for name in cuts(rules)}
    return RoutingState(slices=slices, clock=now)


def absorb(rules: Rules, state: RoutingState, score: Score) -> RoutingState:
    """The state with the evidence of one scored request.

    One user may not dominate a slice's evidence: beyond its part, its requests are excluded. This
    is decided by counts alone, before the scores are examined, so it selects no outcomes.
    """
    slices = dict(state.slices)
    by_slice: dict[str, list[WatchedCell]] = {}
    for cell in rules.watched:
        if (cell.clause, cell.slice) in score.statistics and cell.slice in slices:
            by_slice.setdefault(cell.slice, []).append(cell)
    for name, cells in by_slice.items():
        chance = score.chance if score.drawn is None else score.drawn.get(name)
        if chance is not None:
            slices[name] = _with(rules, slices[name], score, cells, chance)
    return replace(state, slices=slices)


def _with(
    rules: Rules, slice_: SliceState, score: Score, cells: list[WatchedCell], chance: float
) -> SliceState:
    statistics = [(cell, score.statistics[cell.clause, cell.slice]) for cell in cells]
    if not any(statistic.n for _, statistic in statistics):
        return slice_
    if _filled(rules, slice_, score.key):
        return replace(slice_, passed=slice_.passed + 1)
    tracks = dict(slice_.tracks)
    for cell, statistic in statistics:
        track = tracks.get(cell.clause, Track())
        tracks[cell.clause] = add_request(track, statistic, cell.limit, chance)
    recent = (*slice_.recent, score.key)[-remembered(rules) :]
    misread = slice_.misread + (score.misread - slice_.misread) / LATELY
    return replace(slice_, tracks=tracks, recent=recent, misread=misread, scored=slice_.scored + 1)


def remembered(rules: Rules) -> int:
    """The number of a slice's latest requests whose users are kept.

    Enough to find the required users among them, if some send more than others.
    """
    return max(128, 8 * rules.policy.keys)


def _filled(rules: Rules, slice_: SliceState, key: str) -> bool:
    """Whether a user has its part of the latest evidence: 25 %, or more if the contract needs fewer
    than four users.

    Of the latest: a million earlier requests of others do not permit dominating new evidence.
    Requests without a user are evidence, but do not count as users for a diversion.
    """
    if not key:
        return False
    had = slice_.recent.count(key)
    return had > max(_AT_LEAST, len(slice_.recent) / rules.parts)


def pin(
    rules: Rules,
    state: RoutingState,
    slice: str,
    pin: Pin | None,
    *,
    actor: str,
    reason: str,
    now: float,
) -> tuple[RoutingState, tuple[Transition, ...]]:
    """The state after a person pins or releases one slice.

    Args:
        pin: None releases the current pin, if any.

    Raises:
        ContractError: no such slice, an expired pin, or a pin to stable without a stable kernel.
    """
    if slice not in state.slices:
        hint = did_you_mean(slice, state.slices)
        raise ContractError(f"no slice is named {slice!r}", hint=hint)
    now = max(now, state.clock)
    if pin is not None and pin.expires <= now:
        raise ContractError(
            f"the pin of {slice} would expire before it begins",
            hint="give it a time to live, such as 24h",
        )
    if pin is not None and pin.to in ("stable", "enforce") and rules.contract.stable is None:
        raise ContractError(
            f"{slice} cannot be pinned to {pin.to}: there is no stable: kernel",
            hint="declare stable: the kernel that serves diverted requests",
        )
    before = state.slices[slice]
    if before.pin == pin:
        return replace(state, clock=now), ()
    after = replace(before, pin=pin)
    change = Transition(
        number=state.transitions + 1,
        at=now,
        slice=slice,
        before=status_text(before),
        after=status_text(after),
        acted=True,
        reason=reason,
        n=after.scored,
        keys=len(after.keys),
        actor=actor,
    )
    slices = {**state.slices, slice: after}
    return replace(state, slices=slices, transitions=change.number, clock=now), (change,)


def rebase(rules: Rules, state: RoutingState, *, now: float, keep: bool) -> RoutingState:
    """The state under other rules: slices keep their status, by name.

    New slices are active, and slices that are gone are left out.

    Args:
        keep: whether the evidence so far is valid under these rules; otherwise it restarts.
    """
    now = max(now, state.clock)
    slices: dict[str, SliceState] = {}
    for name in cuts(rules):
        slice_ = state.slices.get(name, SliceState(name, since=now))
        clauses = {cell.clause for cell in rules.on(name)}
        if keep:
            tracks = {c: track for c, track in slice_.tracks.items() if c in clauses}
            slices[name] = replace(slice_, tracks=tracks)
        else:
            slices[name] = without_evidence(slice_)
    return replace(state, slices=slices, clock=now)


def set_back(state: RoutingState, *, now: float) -> RoutingState:
    """The state moved back to the current clock, if it was made with a clock that was ahead.

    All durations are kept; otherwise the state would stand still until then.
    """
    ahead = state.clock - now
    if ahead <= 0:
        return state
    slices = {
        name: replace(
            slice_,
            since=slice_.since - ahead,
            step_since=slice_.step_since - ahead,
            moves=tuple(at - ahead for at in slice_.moves),
            calm=None if slice_.calm is None else slice_.calm - ahead,
            pin=None
            if slice_.pin is None
            else replace(slice_.pin, expires=slice_.pin.expires - ahead),
        )
        for name, slice_ in state.slices.items()
    }
    return replace(state, slices=slices, clock=now)


def with_route(
    state: RoutingState,
    *,
    share: float | None,
    mirror: float,
    run: str,
    leg: str,
    sample: float = 0.0,
    turn: int | None = None,
) -> RoutingState:
    """The state with a promotion's route; unchanged if it has this revision or a later one.

    Args:
        share: share of all traffic that infer serves; None: the contract's.
        mirror: share of the other requests that is mirrored to infer.
        sample: share of infer's responses, mirrored ones included, that the promotion logs.
        turn: revision of the run; larger is later.  None: applied unconditionally.
    """
    if turn is not None:
        if turn <= state.turns.get(run, -1):
            return state
        others = {name: last for name, last in state.turns.items() if name != run}
        state = replace(state, turns=dict([*others.items(), (run, turn)][-_RUNS:]))
    return replace(state, base=share, mirror=mirror, sample=sample, run=run, leg=leg)


SELF = "servanda"
HOUR_S = 3600.0
HIDDEN = 0.5  # of the latest tokens without a value, from which on someone is told
MISREAD = 0.005  # of the latest requests were answered for another prompt: one in 200
STEP_SCORED = 20  # requests that each step of the ramp is judged by, at least
_STEPS = 4  # a step of the ramp lasts this part of the dwell, at least

Evidence = tuple[CellEvidence, ...]
# seconds for which the measured load of stable may lack newly diverted traffic
SETTLE_S = 60.0


def advance(
    rules: Rules, state: RoutingState, facts: TrafficFacts
) -> tuple[RoutingState, tuple[Transition, ...]]:
    """The state after one evaluation of every slice, and its transitions.

    If the clock went back, time stands still until it has caught up.
    """
    return _Evaluation(rules, state, replace(facts, now=max(facts.now, state.clock))).done()


class _Evaluation:
    """One evaluation: the slices as they are by now, and the changes so far."""

    def __init__(self, rules: Rules, state: RoutingState, facts: TrafficFacts) -> None:
        self._rules = rules
        self._state = state
        self._facts = facts
        self._now = facts.now
        self._slices = dict(state.slices)
        self._changes: list[Transition] = []

    def done(self) -> tuple[RoutingState, tuple[Transition, ...]]:
        for name in self._slices:
            self._expire(self._slices[name])
        evidence = {name: evidence_of(self._rules, slice_) for name, slice_ in self._slices.items()}
        # the surest fault first: it has the first call on what room there is
        for name in sorted(evidence, key=lambda n: -evidence[n][0].excess if evidence[n] else 0.0):
            if self._slices[name].status == self._state.slices[name].status:
                self._slice(self._slices[name], evidence[name])
        after = replace(
            self._state,
            slices=self._slices,
            transitions=self._state.transitions + len(self._changes),
            clock=self._now,
        )
        return after, tuple(self._changes)

    def _slice(self, slice_: SliceState, evidence: Evidence) -> None:
        if slice_.status == "quarantined":
            if self._now >= slice_.since + slice_.dwell_s:
                reason = f"minimum hold time ({slice_.dwell_s:g} s) elapsed"
                after = replace(without_evidence(slice_), status="probation", since=self._now)
                self._note(slice_, after, (), reason)
        elif slice_.status == "probation":
            self._probation(slice_, evidence)
        elif evidence and evidence[0].paid:
            self._paid(slice_, evidence)
        else:
            slice_ = self._check_visibility(replace(slice_, held=""))
            step = self._ramp if slice_.status == "recovering" else self._serve
            step(slice_, evidence)

    def _check_visibility(self, slice_: SliceState) -> SliceState:
        """Missing values, or responses to another prompt, can mask a fault: one page is sent."""
        lost = max((track.hidden for track in slice_.tracks.values()), default=0.0)
        tokens, requests = f"{100 * lost:.0f} %", f"{100 * slice_.misread:.0f} %"
        missing = f"{tokens} of the recently scored tokens have no value, which can mask a fault"
        other = f"infer ran another prompt than stable for {requests} of recently scored requests"
        shares = {"missing": (lost, HIDDEN, missing), "prompt": (slice_.misread, MISREAD, other)}
        for kind, (share, most, held) in shares.items():
            if share >= most:
                slice_ = self._hold_once(slice_, kind, held)
            elif share < most / 2:
                slice_ = replace(slice_, told=_without(slice_.told, kind))
        return slice_

    def _expire(self, slice_: SliceState) -> None:
        if slice_.pin is None or self._now < slice_.pin.expires:
            return
        after = replace(slice_, pin=None)
        reason = f"the pin of {slice_.pin.actor} expired"
        # infer serves again what was taken from it: someone wants to know
        back = slice_.status in AWAY and acts(self._rules, slice_) and not acts(self._rules, after)
        pages = self._pages(slice_) if back else ()
        self._note(slice_, after, (), reason, acted=True, pages=pages)

    # where infer serves

    def _serve(self, slice_: SliceState, evidence: Evidence) -> None:
        """Between active and suspect the route is the same, and the sample is larger."""
        near = evidence[0].near if evidence else 0.0
        if slice_.status == "active":
            if near >= SUSPICIOUS:
                after = replace(slice_, status="suspect", since=self._now, calm=None)
                self._note(slice_, after, evidence, "the e-value passed the warning level")
            else:
                self._slices[slice_.name] = slice_
            return
        calm = slice_.calm if slice_.calm is not None else self._now
        after = replace(slice_, calm=calm if near < CALM else None)
        if after.calm is not None and self._now >= calm + self._rules.policy.dwell:
            after = replace(after, status="active", since=self._now, calm=None, told=())
            self._note(slice_, after, evidence, "the e-value is below the warning level again")
        else:
            self._slices[slice_.name] = after

    def _paid(self, slice_: SliceState, evidence: Evidence) -> None:
        """The threshold is reached: divert the slice, or record the missing condition."""
        asking = tuple(w for w in evidence if w.paid and w.cell.diverts)
        for_all = tuple(w for w in asking if w.cell.diverts == "all")
        whole = self._slices[WHOLE]
        measured = (self._rules, self._slices, self._facts)
        lacks = {"rule": "no rule of the contract diverts it"}
        # where the whole is away already, its rule asks for nothing more than the slice
        if for_all and (slice_.name == WHOLE or whole.status not in AWAY):
            lacks = unmet_conditions(*measured, slice_, for_all, moved=whole, exempt=True)
            if not lacks:
                if slice_.name != WHOLE:
                    self._quarantine(slice_, for_all, load=0.0)  # the whole brings it along
                self._quarantine(whole, for_all, load=self._facts.in_flight.get(WHOLE, 0.0))
                return
        by_itself = len(asking) > len(for_all) or whole.status in AWAY
        if asking and by_itself:
            lacks = unmet_conditions(*measured, slice_, asking, moved=slice_, exempt=False)
            if not lacks:
                self._quarantine(slice_, asking, load=self._facts.in_flight.get(slice_.name, 0.0))
                return
        self._hold(slice_, asking or evidence, lacks)

    def _hold(self, slice_: SliceState, evidence: Evidence, lacks: dict[str, str]) -> None:
        """The slice is not diverted; each kind of missing condition is reported once."""
        reasons = "; ".join(lacks.values())
        verb = "not diverted" if acts(self._rules, slice_) else "would not be diverted"
        told = tuple(dict.fromkeys((*slice_.told, *lacks)))
        status: Status = "suspect" if slice_.status == "active" else slice_.status
        after = replace(slice_, status=status, held=f"{verb}: {reasons}", told=told, calm=None)
        if status != slice_.status:
            after = replace(after, since=self._now)
        if told != slice_.told or status != slice_.status:
            pages = self._pages(slice_) if told != slice_.told else ()
            self._note(slice_, after, evidence, after.held, pages=pages)
        else:
            self._slices[slice_.name] = after

    def _quarantine(self, slice_: SliceState, evidence: Evidence, *, load: float) -> None:
        policy = self._rules.policy
        left = slice_.status != "probation"  # else it is away already
        again = not left or slice_.status == "recovering"
        # back for less time than a ramp and the dwell take: that is the same fault once more
        again |= bool(slice_.moves) and self._now < slice_.moves[-1] + 2 * slice_.dwell_s
        dwell = min(policy.longest_dwell, 2 * slice_.dwell_s) if again else policy.dwell
        after = replace(
            without_evidence(slice_),
            status="quarantined",
            since=self._now,
            dwell_s=dwell,
            relapses=slice_.relapses + 1 if again else 0,
            step=0,
            load=load,
            moves=self._moves(slice_) if left else slice_.moves,
        )
        cell = evidence[0].cell
        of = self._state.slices[cell.slice]
        after = replace(after, doubts={**slice_.doubts, **doubts(of, evidence)})
        reason = f"{cell.name} {failure_text(of, evidence[0])}{excluded_note(self._rules, of)}"
        reason += f"; relapse: the hold time is now {dwell:g} s" if again else ""
        pages = tuple(dict.fromkeys((*self._pages(slice_), *cell.pages)))
        self._note(slice_, after, evidence, reason, acted=left, pages=pages)
        if len(after.moves) > policy.moves_per_hour:
            self._too_often(after)

    # where stable serves

    def _probation(self, slice_: SliceState, evidence: Evidence) -> None:
        if evidence and evidence[0].paid:
            self._quarantine(slice_, evidence, load=slice_.load)
            return
        slow = slowest(self._rules, slice_)
        if slow is None:
            ready = not self._holds_all(slice_)
        else:
            ready = slow.paid and slice_.scored > 0
        if not ready:
            return
        if slice_.pin is not None and slice_.pinned:
            held = f"not returned: pinned to {slice_.pin.to} by {slice_.pin.actor}"
            self._slices[slice_.name] = replace(slice_, held=held)
            return
        moves = self._moves(slice_)
        if len(moves) > self._rules.policy.moves_per_hour:
            self._too_often(slice_)
            return
        after = replace(
            without_evidence(slice_),
            status="recovering",
            since=self._now,
            step=0,
            step_since=self._now,
            moves=moves,
        )
        passed = f"every cell passed the return test{excluded_note(self._rules, slice_)}"
        reason = f"{passed}; ramp at {exact_percent(RAMP[0])}"
        self._note(slice_, after, () if slow is None else (slow,), reason, acted=True)

    def _holds_all(self, whole: SliceState) -> bool:
        """Whether a slice is diverted whose rule diverted the whole with it.

        The whole has no cell of its own then, and returns after they have.
        """
        return any(
            other.status in AWAY and any(c.diverts == "all" for c in self._rules.on(other.name))
            for other in self._slices.values()
            if other.name != whole.name
        )

    def _ramp(self, slice_: SliceState, evidence: Evidence) -> None:
        """The next step of the ramp, after its time and requests, below the warning level."""
        self._slices[slice_.name] = slice_
        early = self._now < slice_.step_since + slice_.dwell_s / _STEPS
        few = bool(evidence) and slice_.scored < slice_.step_scored + STEP_SCORED
        near = evidence[0].near if evidence else 0.0
        if early or few or near >= SUSPICIOUS or slice_.pinned:
            return
        if slice_.step == len(RAMP) - 1:
            after = replace(
                without_evidence(slice_),
                status="active",
                since=self._now,
                step=0,
                load=0.0,
                doubts={},
            )
            self._note(
                slice_, after, evidence, "it stayed within its limits during the ramp", acted=True
            )
            return
        step = slice_.step + 1
        after = replace(slice_, step=step, step_since=self._now, step_scored=slice_.scored)
        reason = f"ramp at {exact_percent(RAMP[step])}"
        self._note(slice_, after, evidence, reason, acted=True)

    # what every change has

    def _moves(self, slice_: SliceState) -> tuple[float, ...]:
        """Of the last hour, with one now."""
        recent = (at for at in slice_.moves if at > self._now - HOUR_S)
        return (*recent, self._now)[-self._rules.policy.moves_per_hour - 1 :]

    def _too_often(self, slice_: SliceState) -> None:
        """Flapping: the slice is pinned to stable for a while, and one page is sent.

        In mode observe it is not pinned, because a pin acts whatever the mode.
        """
        moves = self._rules.policy.moves_per_hour
        lasts = max(HOUR_S, slice_.dwell_s)
        often = f"its route changed more than {moves} times within an hour"
        if acts(self._rules, slice_):
            ends = self._now + lasts
            if slice_.pin is not None:  # "enforce", without which nothing would hold it afterwards
                ends = max(ends, slice_.pin.expires)
            after = replace(slice_, pin=Pin("stable", SELF, often, ends))
            reason = f"{often}; stable serves it for {lasts:g} s"
            self._note(slice_, after, (), reason, acted=True, pages=self._pages(slice_))
            return
        self._hold_once(slice_, "moves", f"would stay on stable: {often}")

    def _hold_once(self, slice_: SliceState, kind: str, held: str) -> SliceState:
        """Record a remark about a slice that stays; it is reported the first time."""
        after = replace(slice_, held=held, told=(*_without(slice_.told, kind), kind))
        self._slices[slice_.name] = after
        if kind not in slice_.told:
            self._note(slice_, after, (), held, pages=self._pages(slice_))
        return after

    def _pages(self, slice_: SliceState) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p for c in self._rules.on(slice_.name) for p in c.pages))

    def _note(
        self,
        slice_: SliceState,
        after: SliceState,
        evidence: Evidence,
        reason: str,
        *,
        acted: bool = False,
        pages: tuple[str, ...] = (),
    ) -> None:
        """Apply a change, and record it with the evidence that decided it."""
        self._slices[slice_.name] = after
        change = Transition(
            number=self._state.transitions + len(self._changes) + 1,
            at=self._now,
            slice=slice_.name,
            before=status_text(slice_),
            after=status_text(after),
            acted=acted and (acts(self._rules, slice_) or slice_.pin != after.pin),
            reason=reason,
            n=slice_.scored,
            keys=len(slice_.keys),
            pages=pages,
        )
        if evidence:
            change = with_evidence(change, evidence[0], self._state.slices[evidence[0].cell.slice])
        self._changes.append(change)


def _without(told: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(other for other in told if other != kind)


# The conditions of a diversion besides evidence.
#
# Anything unknown counts as a missing condition: the capacity of stable has to be declared and
# its load measured.


def unmet_conditions(
    rules: Rules,
    slices: Mapping[str, SliceState],
    facts: TrafficFacts,
    slice_: SliceState,
    paid: Sequence[CellEvidence],
    *,
    moved: SliceState,
    exempt: bool,
) -> dict[str, str]:
    """The conditions that are missing for diverting `moved`: kind -> sentence; {} if none.

    Args:
        slice_: the slice with the evidence; paid: its cells at their threshold.
        moved: the slice itself, or the whole if a rule diverts all.
        exempt: whether `most_diverted` does not apply, because a rule diverts all.
    """
    sentences = {
        "pin": _pin(slice_) or _pin(moved),
        "keys": _keys(rules, slice_),
        "floor": _floor(facts, paid),
        "room": _room(rules, slices, facts, moved),
        "share": "" if exempt else _share(rules, slices, facts, moved),
    }
    return {kind: sentence for kind, sentence in sentences.items() if sentence}


def _pin(slice_: SliceState) -> str:
    if slice_.pin is None or not slice_.pinned:
        return ""
    return f"{slice_.name} is pinned to {slice_.pin.to} by {slice_.pin.actor}"


def _keys(rules: Rules, slice_: SliceState) -> str:
    has, needs = len(slice_.keys), rules.policy.keys
    return (
        ""
        if has >= needs
        else f"the evidence comes from {has} distinct users, and {needs} are needed"
    )


def _floor(facts: TrafficFacts, paid: Sequence[CellEvidence]) -> str:
    """A limit within twice the noise floor of train says nothing about infer.

    One cell with an informative limit is sufficient.
    """
    sentence = ""
    for cell in (w.cell for w in paid):
        floor = facts.floors.get((cell.clause, cell.slice))
        if floor is None or 2 * floor <= cell.limit:
            return ""
        at, limit = (cell.low + cell.scale * x for x in (floor, cell.limit))
        sentence = sentence or (
            f"the noise floor of train is {at:.3g}, and twice that exceeds the limit {limit:.3g}"
        )
    return sentence


def _room(
    rules: Rules, slices: Mapping[str, SliceState], facts: TrafficFacts, moved: SliceState
) -> str:
    """Whether the peak load of stable leaves capacity for the slice."""
    declared, peak = rules.policy.stable_in_flight, facts.stable_in_flight
    brings = facts.in_flight.get(moved.name)
    if rules.contract.stable is None:
        return "the contract declares no stable: kernel"
    if declared is None:
        return "routing.stable_in_flight is not declared: the capacity of stable is unknown"
    if peak is None or math.isnan(peak):
        return "the requests in flight at stable are not measured"
    if brings is None or math.isnan(brings):
        return f"the requests in flight of {moved.name} are not measured"
    coming = math.fsum(_coming(rules, other, facts.now) for other in slices.values())
    if peak + coming + brings <= declared:
        return ""
    more = f" and {coming:.3g} more being diverted" if coming else ""
    return (
        f"stable has no capacity left: {peak:.3g} requests in flight{more}, {brings:.3g} would be "
        f"added, and its limit is {declared}"
    )


def _coming(rules: Rules, slice_: SliceState, now: float) -> float:
    """The load of a diverted slice that is not yet part of the measured load of stable.

    If decisions are not acted on, it never will be: then all of it counts.
    """
    if slice_.status not in AWAY:
        return 0.0
    settled = slice_.status == "probation" or now >= slice_.since + SETTLE_S
    return 0.0 if settled and acts(rules, slice_) else slice_.load


def _share(
    rules: Rules, slices: Mapping[str, SliceState], facts: TrafficFacts, moved: SliceState
) -> str:
    """The limit on diverted traffic: beyond it the problem is not one of slices.

    Shares of slices that overlap are added: that errs towards not diverting.
    """
    if moved.status == "recovering" or slices[WHOLE].status in AWAY:
        return ""  # it counts as diverted already
    share = facts.shares.get(moved.name)
    if share is None or math.isnan(share):
        return f"the traffic share of {moved.name} is not measured"
    away = [other.name for other in slices.values() if other.status in (*AWAY, "recovering")]
    before = min(1.0, math.fsum(facts.shares.get(name, 0.0) for name in away))
    most = rules.policy.most_diverted
    if before + share <= most:
        return ""
    return (
        f"{before:.3g} of all traffic is diverted, {share:.3g} would be added, and "
        f"routing.most_diverted is {most:.3g}"
    )
