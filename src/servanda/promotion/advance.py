# advance: the state of a promotion and one finding -> its next state, and the notifications.
#
# Forward on evidence alone, and one step (leg) at a time; back from everywhere.  Each evaluation
# derives the status anew: a promotion that waits for an approval is rolled back by the same line as
# one that gathers evidence.  People act on a run too: with an actor, a reason and a new revision.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import Leg
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import Outcome, worst
from servanda.promotion.state import (
    CellResult,
    Effect,
    LegFinding,
    Override,
    RuleAction,
    State,
    Status,
    leg_of,
)
from servanda.traces.serialization import to_plain

ERRORS = 3  # failed evaluations in a row after which a run is halted
EXPIRED = "the evidence has expired"

Move = tuple[State, tuple[Effect, ...]]


def begin(run: str, key: EvidenceKey, course: Sequence[Leg], *, now: float) -> Move:
    """A run at its first step.

    Raises:
        EvidenceError: `now` is not a valid time.
    """
    _refuse_timeless(now)
    state = State(
        run, key, status="running", since=now, seen=now, weighed=now, why="the promotion starts"
    )
    return move_to(course, None, state, None)


def advance(course: Sequence[Leg], state: State, finding: LegFinding, *, now: float) -> Move:
    """The state after an evaluation, and the notifications that follow; pure.

    Args:
        course: the steps that the run began with.
        now: unix seconds, not before the latest time of the run.

    Raises:
        EvidenceError: the clock went back, or the finding is for another step or has no key.
    """
    in_order(state, now)
    if state.ended:
        return state, ()
    leg = leg_of(course, state)
    if finding.leg != leg.name:
        raise EvidenceError(
            f"the finding is for step {finding.leg}, and promotion {state.run} is at {leg.name}",
            hint="evaluate again: the promotion moved in the meantime",
        )
    if finding.key is None and not finding.error:
        raise EvidenceError(
            f"the finding on {leg.name} has no evidence key, and promotion {state.run} is bound "
            "to one",
            hint="give the key that the kernels answered with: evidence counts for no other",
        )
    overrides = tuple(o for o in state.overrides if o.expires > now)
    current = replace(state, seen=now, overrides=overrides)
    requested = tuple(_rule_actions(current, finding))
    after, decided = _decided(course, current, leg, finding, requested, now)
    return move_to(course, state, after, decided, requested)


def in_order(state: State, now: float) -> None:
    """Refuse a time before the latest one of the run.

    Raises:
        EvidenceError: it is earlier, or not a valid time.
    """
    _refuse_timeless(now)
    if now < state.seen:
        raise EvidenceError(
            f"the clock went back by {state.seen - now:,.3f} s since promotion {state.run} was "
            "seen",
            hint="set this machine's clock: hold time and expiry depend on it; nothing was changed",
        )


def _refuse_timeless(now: float) -> None:
    if not math.isfinite(now):
        raise EvidenceError(
            f"the clock reads {now}, which is not a time",
            hint="give unix seconds; nothing was changed",
        )


def move_to(
    course: Sequence[Leg],
    before: State | None,
    after: State,
    decided: CellResult | None,
    requested: Sequence[RuleAction] = (),
) -> Move:
    """The next state, with a new revision if a notification follows."""
    turned = replace(after, turn=after.turn + 1)
    effects = effects_of(course, before, turned, decided, requested)
    if effects or before is None or before.span != after.span:
        return turned, effects
    return after, ()


def _decided(
    course: Sequence[Leg],
    state: State,
    leg: Leg,
    finding: LegFinding,
    requested: Sequence[RuleAction],
    now: float,
) -> tuple[State, CellResult | None]:
    """The state after an evaluation, and the cell that decided it."""
    if other := _changed(state.key, finding.key):
        # the evidence is for another build, which must not keep its traffic
        state = replace(state, valid_until=None)
        return _ended(
            state, "superseded", f"{', '.join(other)} changed since the promotion started"
        ), None
    counted = [cell for cell in finding.cells if not _waived(state, cell)]
    outcome, decided = judged(counted)
    if not finding.error:
        weighed = now if finding.evidence != state.evidence else state.weighed
        errors = state.errors if outcome == "error" else 0
        state = replace(state, evidence=finding.evidence, weighed=weighed, errors=errors)
        state = replace(state, asked=tuple(map(str, requested)))
    # first: an expired build in `full` keeps its traffic, a violated one must not
    if outcome == "violated":
        assert decided is not None
        return _ended(state, "rolled_back", f"{decided.name} is violated"), decided
    if back := _cell_for(requested, "roll_back"):
        return _ended(
            state, "rolled_back", f"an escalation rule asks for a rollback: {back.name}"
        ), back
    if state.expired:
        return _ended(state, "superseded", EXPIRED), None
    if finding.error:
        return _after_failure(state, finding.error), None
    if halt := _cell_for(requested, "halt"):
        return replace(
            state, status="halted", why=f"an escalation rule asks for a halt: {halt.name}"
        ), halt
    if outcome == "error":
        assert decided is not None
        return _after_failure(state, ": ".join(filter(None, (decided.name, decided.note)))), decided
    if outcome != "holds":
        return _after_undecided(state, leg, finding, decided, now), decided
    if hold := _cell_for(requested, "hold"):
        return replace(
            state, status="halted", why=f"an escalation rule asks for a hold: {hold.name}"
        ), hold
    if leg.live and finding.groups < leg.first:
        why = f"{finding.groups:,} of {leg.first:,} prompt groups"
        return replace(state, status="awaiting_evidence", why=why), decided
    return _after_holding(course, state, leg, finding, now), decided


def _changed(begun: EvidenceKey, now: EvidenceKey | None) -> list[str]:
    """Parts of the key that differ from the run's; empty without a key."""
    if now is None:
        return []
    attempt = ["the attempt"] if begun.attempt != now.attempt else []
    return [*begun.differences(now), *attempt]


def judged(cells: Sequence[CellResult]) -> tuple[Outcome, CellResult | None]:
    """The outcome of the cells that count, and the one that decides it.

    A cell without samples does not hold, whatever its outcome, and validity checks alone do not
    either.
    """
    known = [c for c in cells if c.outcome != "not applicable"]
    counted = [
        replace(c, outcome="inconclusive") if c.outcome == "holds" and c.n <= 0 else c
        for c in known
    ]
    promises = [c for c in counted if not c.guard]
    outcome = worst([*(c.outcome for c in counted), *(() if promises else ("inconclusive",))])
    deciding = [c for c in (promises if outcome == "holds" else counted) if c.outcome == outcome]
    return outcome, max(deciding, key=_nearness, default=None)


def _nearness(cell: CellResult) -> float:
    """The distance of a cell to its limit, to rank cells."""
    near = cell.low if cell.at_least else cell.high
    end = near if near is not None else cell.value
    if end is None or cell.limit is None:
        return -math.inf
    end, limit = (cell.limit, end) if cell.at_least else (end, cell.limit)
    return end / limit if limit else math.inf if end else -math.inf


def _waived(state: State, cell: CellResult) -> bool:
    return any(override.covers(cell) for override in state.overrides)


def _rule_actions(state: State, finding: LegFinding) -> Iterator[RuleAction]:
    """The actions of rules, over cells that are not overridden.

    Empty if the measurement failed or another build was measured.
    """
    if finding.error or _changed(state.key, finding.key):
        return
    for action in finding.asked:
        cells = tuple(cell for cell in action.cells if not _waived(state, cell))
        if cells:
            yield replace(action, cells=cells)


def _cell_for(requested: Sequence[RuleAction], action: str) -> CellResult | None:
    return next((a.cells[0] for a in requested if a.action == action), None)


def _ended(state: State, status: Status, why: str) -> State:
    return replace(state, status=status, why=why, approved="")


def _after_failure(state: State, error: str) -> State:
    """A failed measurement is no evidence against the kernel: the state is unchanged.

    The same holds for a cell in error, whatever `if_inconclusive` says of undecided ones.
    """
    errors = state.errors + 1
    if errors >= ERRORS:
        why = f"measuring failed {errors} times in a row: {error}"
        return replace(state, errors=errors, status="halted", why=why)
    why = f"measuring failed: {error}"
    return replace(state, errors=errors, status="awaiting_evidence", why=why)


def _after_undecided(
    state: State, leg: Leg, finding: LegFinding, decided: CellResult | None, now: float
) -> State:
    on = f"{decided.name} is {decided.outcome}" if decided else "nothing was judged"
    full = leg.stage == "full"
    if finding.groups < leg.last or (leg.if_inconclusive == "wait" and not full):
        many = f"{finding.groups:,} of {leg.first:,} to {leg.last:,} prompt groups"
        # a new evaluation window is undecided at first, after one that held: no notification
        if full and state.status == "completed":
            return replace(state, why=f"everything held before; on {leg.name} {on}; {many}")
        return replace(state, status="awaiting_evidence", why=f"{on}; {many}")
    why = f"{on} at the limit of {leg.last:,} prompt groups"
    if leg.if_inconclusive == "roll_back":
        return _ended(state, "rolled_back", why)
    status: Status = "awaiting_evidence" if leg.if_inconclusive == "wait" else "halted"
    if full:  # infer serves all traffic, so evaluation continues with a new window
        state = replace(state, span=state.span + 1, since=now)
    return replace(state, status=status, why=why)


def _after_holding(
    course: Sequence[Leg], state: State, leg: Leg, finding: LegFinding, now: float
) -> State:
    """The state after all counting cells hold."""
    if leg.valid_for_s is not None:
        state = replace(state, valid_until=state.weighed + leg.valid_for_s)
        if state.expired:
            return _ended(state, "superseded", EXPIRED)
    waived = [c.name for c in finding.cells if c.outcome != "holds" and _waived(state, c)]
    # overridden cells did not count
    every = f"everything but {', '.join(waived)} (overridden)" if waived else "everything"
    stayed, over = now - state.since, state.leg == len(course) - 1
    if stayed < leg.dwell_s:
        why = f"{every} holds; {stayed:,.0f} of {leg.dwell_s:,.0f} s of the hold time"
        through = over and state.span > 1  # an earlier window satisfied the hold time
        return replace(state, status="completed" if through else "running", why=why)
    if over:
        if leg.stage == "full" and finding.groups >= leg.last:  # a new, empty window begins
            state = replace(state, span=state.span + 1, since=now)
        return replace(state, status="completed", why=f"{every} holds on {leg.name}")
    following = course[state.leg + 1]
    ask = leg.approval and following.stage != leg.stage
    if ask and state.approved != leg.name:
        why = f"{every} holds; {following.name} needs an approval"
        return replace(state, status="awaiting_approval", why=why)
    return replace(
        state,
        leg=state.leg + 1,
        status="running",
        since=now,
        approved="",
        why=f"{every} held on {leg.name}",
    )


def approve(course: Sequence[Leg], state: State, *, actor: str, reason: str, now: float) -> Move:
    """Approve the next stage; the next evaluation that holds moves there.

    Raises:
        EvidenceError: the run awaits no approval, the actor is missing, or the clock went back.
    """
    _refuse_unsigned(state, "an approval", actor, reason, now)
    if state.status != "awaiting_approval":
        raise EvidenceError(
            f"promotion {state.run} does not wait for an approval: it is {_status_text(state)}",
            hint="wait until everything holds on the step: an approval is for evidence that is "
            "there"
            if not state.ended
            else "start another attempt: servanda promote --fresh",
        )
    why = f"{actor} approved: {reason}"
    leg = leg_of(course, state).name
    return move_to(
        course, state, replace(state, status="running", approved=leg, seen=now, why=why), None
    )


def override(course: Sequence[Leg], state: State, given: Override, *, now: float) -> Move:
    """Exclude a cell from decisions until the override expires.

    Raises:
        EvidenceError: it has expired or never does, the run has ended, the actor is missing, or the
            clock went back.
    """
    _refuse_unsigned(state, "an override", given.actor, given.reason, now)
    if state.ended:
        raise EvidenceError(
            f"promotion {state.run} is {_status_text(state)}: there is nothing to override",
            hint="start another attempt: servanda promote --fresh",
        )
    finite = math.isfinite(given.expires)
    if not finite or given.expires <= now:
        when = "expires before it begins" if finite else "never expires"
        raise EvidenceError(
            f"the override of {given.clause} on {given.slice} {when}",
            hint="give it a time to live, such as --ttl 24h",
        )
    why = f"{given.actor} overrode {given.clause} on {given.slice}: {given.reason}"
    others = tuple(o for o in state.overrides if (o.clause, o.slice) != (given.clause, given.slice))
    after = replace(state, overrides=(*others, given), seen=now, why=why)
    return move_to(course, state, after, None)


def roll_back(course: Sequence[Leg], state: State, *, actor: str, reason: str, now: float) -> Move:
    """Return all traffic to stable, from any state.

    Raises:
        EvidenceError: the run is rolled back already, the actor is missing, or the clock went back.
    """
    _refuse_unsigned(state, "a rollback", actor, reason, now)
    if state.status == "rolled_back":
        raise EvidenceError(
            f"promotion {state.run} is {_status_text(state)}",
            hint="servanda promotion status shows who serves",
        )
    why = f"{actor} rolled back: {reason}"
    after = replace(state, status="rolled_back", approved="", seen=now, why=why)
    return move_to(course, state, after, None)


def _refuse_unsigned(state: State, act: str, actor: str, reason: str, now: float) -> None:
    in_order(state, now)
    for name, text in (("actor", actor), ("reason", reason)):
        if not text.strip():
            raise EvidenceError(
                f"{act} needs {'an actor' if name == 'actor' else 'a reason'}",
                hint=f"give --{name}: it is written to the ledger",
            )


def _status_text(state: State) -> str:
    return f"{state.status.replace('_', ' ')} ({state.why})"


def route_of(course: Sequence[Leg], state: State) -> dict[str, float]:
    """The route: the share of infer, the mirrored share, and the share of scored responses.

    A rolled back run keeps its mirrored traffic, so that the fault can be examined.  Expired
    evidence is no evidence against a kernel that serves all traffic: there the route stays.
    """
    leg = course[state.leg]
    serves_on = leg.stage == "full" and state.status == "superseded" and state.expired
    if state.ended and not serves_on:
        shadow = next((stage for stage in course if stage.stage == "shadow"), None)
        if shadow is None or not leg.live:
            return {"share": 0.0, "mirror": 0.0, "sample": 0.0}
        return {"share": 0.0, "mirror": shadow.mirror, "sample": shadow.sample}
    sample = leg.sample if leg.live else 0.0
    return {"share": leg.share, "mirror": leg.mirror, "sample": sample}


def effects_of(
    course: Sequence[Leg],
    before: State | None,
    after: State,
    decided: CellResult | None,
    requested: Sequence[RuleAction] = (),
) -> tuple[Effect, ...]:
    """Notifications of a change: of the route if it differs, to people if the status differs.

    Args:
        requested: actions of rules now; a page is sent once, when its condition becomes true.
    """
    effects: list[Effect] = []
    body = _body(course, before, after, decided)
    if before is None or _routed(course, before) != _routed(course, after):
        effects.append(Effect("route", f"{after.run}:{after.turn}:route", body))
    waived = before is not None and not {*after.overrides} <= {*before.overrides}
    if before is None or _announced(before) != _announced(after) or waived:
        effects.append(Effect("notify", f"{after.run}:{after.turn}:notify", body))
    known = before.asked if before is not None else ()
    begun = [action for action in requested if action.action == "page" and str(action) not in known]
    for whom in dict.fromkeys(action.value for action in begun):
        rules = [action.rule for action in begun if action.value == whom]
        paged = {**body, "to": whom, "for": [*dict.fromkeys(rules)]}
        effects.append(Effect("page", f"{after.run}:{after.turn}:page:{whom}", paged))
    return tuple(effects)


def _routed(course: Sequence[Leg], state: State) -> tuple[str, dict[str, float]]:
    """The notification for a proxy: the route, and the step for its log."""
    return leg_of(course, state).name, route_of(course, state)


def _announced(state: State) -> tuple[object, ...]:
    """The fields whose change is notified; the reason alone changes with every number."""
    return state.status, state.leg, state.approved


def _body(
    course: Sequence[Leg], before: State | None, after: State, decided: CellResult | None
) -> dict[str, Any]:
    leg = leg_of(course, after)
    numbers = None
    if decided is not None:
        names = ("value", "low", "high", "limit", "n", "units", "outcome", "note")
        numbers = to_plain({"cell": decided.name, **{n: getattr(decided, n) for n in names}})
        numbers |= {"share": True} if decided.share else {}
    return {
        "run": after.run,
        "leg": leg.name,
        "stage": leg.stage,
        "status": after.status,
        "from": leg_of(course, before).name if before is not None else None,
        **route_of(course, after),
        "why": after.why,
        "decided": numbers,
        "at": after.seen,
        "turn": after.turn,
    }
