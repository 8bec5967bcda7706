# Operator: actions of people on a run; each has an actor, a reason and a new revision.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from servanda.contract.stages import Leg
from servanda.errors import EvidenceError
from servanda.promotion.advance import Move, in_order, move_to
from servanda.promotion.state import Override, State, leg_of


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
