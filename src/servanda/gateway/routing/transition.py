# A look: each slice goes at most one step, by its evidence, the clock, and what is measured.
#
#     active <-> suspect -> quarantined -> probation -> recovering -> active
#                                ^-------------'------------'
#
# Away from infer is the dear direction: it needs the price, distinct users, a rule that asks
# for it, and room at stable.  What is missing is said, and somebody is told once.  Back is the
# slow one: a dwell, fresh evidence of every cell, then a ramp; each relapse doubles the dwell.

from __future__ import annotations

from dataclasses import replace

from servanda.contract.model import WHOLE
from servanda.gateway.routing.divert_conditions import missing
from servanda.gateway.routing.evidence_price import (
    CALM,
    SUSPICIOUS,
    Weighed,
    broken,
    decided,
    doubts,
    left_out,
    slowest,
    weighed,
)
from servanda.gateway.routing.model import AWAY, Pin, Status
from servanda.gateway.routing.snapshot import acts
from servanda.gateway.routing.state import (
    RAMP,
    Facts,
    RoutingState,
    Rules,
    SliceState,
    Transition,
    fresh,
    named,
)

SELF = "servanda"
HOUR_S = 3600.0
HIDDEN = 0.5  # of the latest tokens without a value, from which on somebody is told
MISREAD = 0.005  # of the latest requests were answered for another prompt: one in 200
STEP_SCORED = 20  # requests that each step of the ramp is judged by, at least
_STEPS = 4  # a step of the ramp lasts this part of the dwell, at least

Found = tuple[Weighed, ...]


def look(
    rules: Rules, state: RoutingState, facts: Facts
) -> tuple[RoutingState, tuple[Transition, ...]]:
    """The state after every slice was looked at once, and what changed.

    A clock that went back is taken to stand still until it is where it was.
    """
    return _Look(rules, state, replace(facts, now=max(facts.now, state.clock))).done()


class _Look:
    """One look: the slices as they are by now, and the changes so far."""

    def __init__(self, rules: Rules, state: RoutingState, facts: Facts) -> None:
        self._rules = rules
        self._state = state
        self._facts = facts
        self._now = facts.now
        self._slices = dict(state.slices)
        self._changes: list[Transition] = []

    def done(self) -> tuple[RoutingState, tuple[Transition, ...]]:
        for name in self._slices:
            self._expire(self._slices[name])
        found = {name: weighed(self._rules, one) for name, one in self._slices.items()}
        # the surest fault first: it has the first call on what room there is
        for name in sorted(found, key=lambda n: -found[n][0].excess if found[n] else 0.0):
            if self._slices[name].status == self._state.slices[name].status:
                self._slice(self._slices[name], found[name])
        after = replace(
            self._state,
            slices=self._slices,
            transitions=self._state.transitions + len(self._changes),
            clock=self._now,
        )
        return after, tuple(self._changes)

    def _slice(self, one: SliceState, found: Found) -> None:
        if one.status == "quarantined":
            if self._now >= one.since + one.dwell_s:
                reason = f"it was away for {one.dwell_s:g} s"
                after = replace(fresh(one), status="probation", since=self._now)
                self._note(one, after, (), reason)
        elif one.status == "probation":
            self._probation(one, found)
        elif found and found[0].paid:
            self._paid(one, found)
        else:
            one = self._seen(replace(one, held=""))
            step = self._ramp if one.status == "recovering" else self._serve
            step(one, found)

    def _seen(self, one: SliceState) -> SliceState:
        """Where answers have no value a fault may hide for ever, and somebody is told once; so it
        is where they are for another prompt."""
        lost = max((track.hidden for track in one.tracks.values()), default=0.0)
        missing = f"{lost:.0%} of what was lately scored has no value, and may hide a fault"
        other = f"infer answered {one.misread:.0%} of the latest scored requests for another prompt"
        found = {"missing": (lost, HIDDEN, missing)}
        found["prompt"] = one.misread, MISREAD, f"{other} than stable makes of them"
        for kind, (share, most, held) in found.items():
            if share >= most:
                one = self._hold_once(one, kind, held)
            elif share < most / 2:
                one = replace(one, told=_without(one.told, kind))
        return one

    def _expire(self, one: SliceState) -> None:
        if one.pin is None or self._now < one.pin.expires:
            return
        after = replace(one, pin=None)
        reason = f"the pin of {one.pin.actor} is over"
        # infer serves again what was taken from it: somebody wants to know
        back = one.status in AWAY and acts(self._rules, one) and not acts(self._rules, after)
        pages = self._pages(one) if back else ()
        self._note(one, after, (), reason, acted=True, pages=pages)

    # where infer serves

    def _serve(self, one: SliceState, found: Found) -> None:
        """Between active and suspect the route is the same, and more is scored."""
        near = found[0].near if found else 0.0
        if one.status == "active":
            if near >= SUSPICIOUS:
                after = replace(one, status="suspect", since=self._now, calm=None)
                self._note(one, after, found, "the e-value passed the warning level")
            else:
                self._slices[one.name] = one
            return
        calm = one.calm if one.calm is not None else self._now
        after = replace(one, calm=calm if near < CALM else None)
        if after.calm is not None and self._now >= calm + self._rules.policy.dwell:
            after = replace(after, status="active", since=self._now, calm=None, told=())
            self._note(one, after, found, "the e-value is below the warning level again")
        else:
            self._slices[one.name] = after

    def _paid(self, one: SliceState, found: Found) -> None:
        """The price is paid: the slice leaves infer, or it is said why it does not."""
        asking = tuple(w for w in found if w.paid and w.cell.diverts)
        for_all = tuple(w for w in asking if w.cell.diverts == "all")
        whole = self._slices[WHOLE]
        lacks = {"rule": "no rule of the contract diverts it"}
        # where the whole is away already, its rule asks for nothing more than the slice
        if for_all and (one.name == WHOLE or whole.status not in AWAY):
            lacks = self._missing(one, for_all, whole, exempt=True)
            if not lacks:
                if one.name != WHOLE:
                    self._quarantine(one, for_all, load=0.0)  # the whole brings it along
                self._quarantine(whole, for_all, load=self._facts.in_flight.get(WHOLE, 0.0))
                return
        by_itself = len(asking) > len(for_all) or whole.status in AWAY
        if asking and by_itself:
            lacks = self._missing(one, asking, one, exempt=False)
            if not lacks:
                self._quarantine(one, asking, load=self._facts.in_flight.get(one.name, 0.0))
                return
        self._hold(one, asking or found, lacks)

    def _missing(
        self, one: SliceState, paid: Found, moved: SliceState, *, exempt: bool
    ) -> dict[str, str]:
        return missing(
            self._rules, self._slices, self._facts, one=one, paid=paid, moved=moved, exempt=exempt
        )

    def _hold(self, one: SliceState, found: Found, lacks: dict[str, str]) -> None:
        """It stays, and each kind of reason is told once."""
        said = "; ".join(lacks.values())
        verb = "not diverted" if acts(self._rules, one) else "would not be diverted"
        told = tuple(dict.fromkeys((*one.told, *lacks)))
        status: Status = "suspect" if one.status == "active" else one.status
        after = replace(one, status=status, held=f"{verb}: {said}", told=told, calm=None)
        if status != one.status:
            after = replace(after, since=self._now)
        if told != one.told or status != one.status:
            pages = self._pages(one) if told != one.told else ()
            self._note(one, after, found, after.held, pages=pages)
        else:
            self._slices[one.name] = after

    def _quarantine(self, one: SliceState, found: Found, *, load: float) -> None:
        policy = self._rules.policy
        left = one.status != "probation"  # else it is away already
        again = not left or one.status == "recovering"
        # back for less time than a ramp and the dwell take: that is the same fault once more
        again |= bool(one.moves) and self._now < one.moves[-1] + 2 * one.dwell_s
        dwell = min(policy.longest_dwell, 2 * one.dwell_s) if again else policy.dwell
        after = replace(
            fresh(one),
            status="quarantined",
            since=self._now,
            dwell_s=dwell,
            relapses=one.relapses + 1 if again else 0,
            step=0,
            load=load,
            moves=self._moves(one) if left else one.moves,
        )
        cell = found[0].cell
        of = self._state.slices[cell.slice]
        after = replace(after, doubts={**one.doubts, **doubts(of, found)})
        reason = f"{cell.name} {broken(of, found[0])}{left_out(self._rules, of)}"
        reason += f"; again, so that the dwell is {dwell:g} s" if again else ""
        pages = tuple(dict.fromkeys((*self._pages(one), *cell.pages)))
        self._note(one, after, found, reason, acted=left, pages=pages)
        if len(after.moves) > policy.moves_per_hour:
            self._too_often(after)

    # where stable serves

    def _probation(self, one: SliceState, found: Found) -> None:
        if found and found[0].paid:
            self._quarantine(one, found, load=one.load)
            return
        slow = slowest(self._rules, one)
        if slow is None:
            ready = not self._holds_all(one)
        else:
            ready = slow.paid and one.scored > 0
        if not ready:
            return
        if one.pin is not None and one.pin.to in ("stable", "infer"):
            held = f"not brought back: pinned to {one.pin.to} by {one.pin.actor}"
            self._slices[one.name] = replace(one, held=held)
            return
        moves = self._moves(one)
        if len(moves) > self._rules.policy.moves_per_hour:
            self._too_often(one)
            return
        after = replace(
            fresh(one),
            status="recovering",
            since=self._now,
            step=0,
            step_since=self._now,
            moves=moves,
        )
        kept = f"every cell is within its limit{left_out(self._rules, one)}"
        reason = f"{kept}; infer serves {RAMP[0]:.0%} of its share"
        self._note(one, after, () if slow is None else (slow,), reason, acted=True)

    def _holds_all(self, whole: SliceState) -> bool:
        """Whether a slice is away whose rule took the whole with it.

        The whole has no cell of its own then, and comes back when they have.
        """
        return any(
            one.status in AWAY and any(c.diverts == "all" for c in self._rules.on(one.name))
            for one in self._slices.values()
            if one.name != whole.name
        )

    def _ramp(self, one: SliceState, found: Found) -> None:
        """A step further, after its time and its requests, and while nothing is suspicious."""
        self._slices[one.name] = one
        early = self._now < one.step_since + one.dwell_s / _STEPS
        few = bool(found) and one.scored < one.step_scored + STEP_SCORED
        near = found[0].near if found else 0.0
        pinned = one.pin is not None and one.pin.to in ("stable", "infer")
        if early or few or near >= SUSPICIOUS or pinned:
            return
        if one.step == len(RAMP) - 1:
            after = replace(
                fresh(one), status="active", since=self._now, step=0, load=0.0, doubts={}
            )
            self._note(one, after, found, "it kept its limits through the ramp", acted=True)
            return
        step = one.step + 1
        after = replace(one, step=step, step_since=self._now, step_scored=one.scored)
        reason = f"infer serves {RAMP[step]:.0%} of its share"
        self._note(one, after, found, reason, acted=True)

    # what every change has

    def _moves(self, one: SliceState) -> tuple[float, ...]:
        """Of the last hour, with one now."""
        kept = (at for at in one.moves if at > self._now - HOUR_S)
        return (*kept, self._now)[-self._rules.policy.moves_per_hour - 1 :]

    def _too_often(self, one: SliceState) -> None:
        """It went to and fro too often: stable has it for a while, and somebody is told.

        What is only watched is not pinned, since a pin is followed whatever the mode.
        """
        moves = self._rules.policy.moves_per_hour
        lasts = max(HOUR_S, one.dwell_s)
        often = f"it changed its route more than {moves} times in an hour"
        if acts(self._rules, one):
            ends = self._now + lasts
            if one.pin is not None:  # "enforce", without which nothing would hold it afterwards
                ends = max(ends, one.pin.expires)
            after = replace(one, pin=Pin("stable", SELF, often, ends))
            reason = f"{often}; stable serves it for {lasts:g} s"
            self._note(one, after, (), reason, acted=True, pages=self._pages(one))
            return
        self._hold_once(one, "moves", f"would stay on stable: {often}")

    def _hold_once(self, one: SliceState, kind: str, held: str) -> SliceState:
        """Say something of a slice that stays where it is; somebody is told the first time."""
        after = replace(one, held=held, told=(*_without(one.told, kind), kind))
        self._slices[one.name] = after
        if kind not in one.told:
            self._note(one, after, (), held, pages=self._pages(one))
        return after

    def _pages(self, one: SliceState) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p for c in self._rules.on(one.name) for p in c.pages))

    def _note(
        self,
        one: SliceState,
        after: SliceState,
        found: Found,
        reason: str,
        *,
        acted: bool = False,
        pages: tuple[str, ...] = (),
    ) -> None:
        """Take the change over, and write it down with the evidence that decided it."""
        self._slices[one.name] = after
        change = Transition(
            number=self._state.transitions + len(self._changes) + 1,
            at=self._now,
            slice=one.name,
            before=named(one),
            after=named(after),
            acted=acted and (acts(self._rules, one) or one.pin != after.pin),
            reason=reason,
            n=one.scored,
            keys=len(one.keys),
            pages=pages,
        )
        if found:
            change = decided(change, found[0], self._state.slices[found[0].cell.slice])
        self._changes.append(change)


def _without(told: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(other for other in told if other != kind)
