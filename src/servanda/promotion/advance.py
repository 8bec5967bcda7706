# advance: the state of a promotion and one finding -> its next state, and the notifications.
#
# Forward on evidence alone, and one step (leg) at a time; back from everywhere.  Each evaluation
# derives the status anew: a promotion that waits for an approval is rolled back by the same line as
# one that gathers evidence.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import Leg
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import Outcome, worst
from servanda.promotion.effects import effects_of
from servanda.promotion.state import (
    CellResult,
    Effect,
    LegFinding,
    RuleAction,
    State,
    Status,
    leg_of,
)

ERRORS = 3  # looks in a row at which measuring failed, after which a run is halted
EXPIRED = "the evidence has expired"

Move = tuple[State, tuple[Effect, ...]]


def begin(run: str, key: EvidenceKey, course: Sequence[Leg], *, now: float) -> Move:
    """A run at its first leg.

    Raises:
        EvidenceError: `now` is no time.
    """
    _refuse_timeless(now)
    state = State(
        run, key, status="running", since=now, seen=now, weighed=now, why="the promotion starts"
    )
    return move_to(course, None, state, None)


def advance(course: Sequence[Leg], state: State, finding: LegFinding, *, now: float) -> Move:
    """The state after an evaluation, and the notifications that follow; pure.

    Args:
        course: the legs that the run began with.
        now: unix seconds, never before what the run saw last.

    Raises:
        EvidenceError: the clock went back, or the finding is of another leg, or of no one.
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
    """Refuse a time before the latest that a run was told.

    Raises:
        EvidenceError: it is, or it is no time.
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
    """The next state, counted as a turn where anybody is to be told of it."""
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
    """The state after a look, and the cell that decided it."""
    if other := _changed(state.key, finding.key):
        # what was shown is of another build, and keeps no traffic there
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
    # first of all: what has expired in full keeps its traffic, and what is broken must not
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
    """Parts of the key that are no longer those of the run; none are known where there is none."""
    if now is None:
        return []
    attempt = ["the attempt"] if begun.attempt != now.attempt else []
    return [*begun.differences(now), *attempt]


def judged(cells: Sequence[CellResult]) -> tuple[Outcome, CellResult | None]:
    """The outcome of the cells that count, and the one that decides it.

    What has no sample behind it does not hold, whatever it says of itself, and preconditions
    alone promise nothing.
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
    """How near a cell is to its limit, or how far beyond: the one to look at first."""
    near = cell.low if cell.at_least else cell.high
    end = near if near is not None else cell.value
    if end is None or cell.limit is None:
        return -math.inf
    end, limit = (cell.limit, end) if cell.at_least else (end, cell.limit)
    return end / limit if limit else math.inf if end else -math.inf


def _waived(state: State, cell: CellResult) -> bool:
    return any(override.covers(cell) for override in state.overrides)


def _rule_actions(state: State, finding: LegFinding) -> Iterator[RuleAction]:
    """What rules ask for, by the cells that are not waived.

    Nothing where measuring failed, or another build was measured.
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
    """A measurement that failed says nothing of the kernel: nothing moves.

    Neither does a cell that is an error, whatever `if_inconclusive` says of undecided ones.
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
        # a new span is not decided for a while, and the one before it held: that is no news
        if full and state.status == "completed":
            return replace(state, why=f"everything held before; on {leg.name} {on}; {many}")
        return replace(state, status="awaiting_evidence", why=f"{on}; {many}")
    why = f"{on} at the limit of {leg.last:,} prompt groups"
    if leg.if_inconclusive == "roll_back":
        return _ended(state, "rolled_back", why)
    status: Status = "awaiting_evidence" if leg.if_inconclusive == "wait" else "halted"
    if full:  # infer serves everybody, so somebody goes on looking, at a fresh span
        state = replace(state, span=state.span + 1, since=now)
    return replace(state, status=status, why=why)


def _after_holding(
    course: Sequence[Leg], state: State, leg: Leg, finding: LegFinding, now: float
) -> State:
    """Everything that counts holds: is it time to go forward?"""
    if leg.valid_for_s is not None:
        state = replace(state, valid_until=state.weighed + leg.valid_for_s)
        if state.expired:
            return _ended(state, "superseded", EXPIRED)
    waived = [c.name for c in finding.cells if c.outcome != "holds" and _waived(state, c)]
    # not to be read as more than what counted
    every = f"everything but {', '.join(waived)} (overridden)" if waived else "everything"
    stayed, over = now - state.since, state.leg == len(course) - 1
    if stayed < leg.dwell_s:
        why = f"{every} holds; {stayed:,.0f} of {leg.dwell_s:,.0f} s of the hold time"
        through = over and state.span > 1  # an earlier span was long enough
        return replace(state, status="completed" if through else "running", why=why)
    if over:
        if leg.stage == "full" and finding.groups >= leg.last:  # the next span begins, from nothing
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
