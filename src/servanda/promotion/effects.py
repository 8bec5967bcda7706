# Effects: what the world is told of a change, each with a key of its own.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from servanda.course import Leg
from servanda.promotion.values import Effect, Found, State


def route_of(course: Sequence[Leg], state: State) -> dict[str, float]:
    """Who serves: the share of infer, what is mirrored to it, what is scored of its answers.

    A run that is rolled back keeps its shadow, for what went wrong is to be seen.  Evidence that
    expires says nothing against a kernel that serves everybody: there the route stays.
    """
    leg = course[state.leg]
    expired = state.status == "superseded" and state.valid_until is not None
    in_full = leg.stage == "full" and expired and state.seen >= (state.valid_until or 0.0)
    if state.ended and not in_full:
        shadow = next((one for one in course if one.stage == "shadow"), None)
        seen = shadow is not None and leg.live
        return {
            "share": 0.0,
            "mirror": shadow.mirror if shadow and seen else 0.0,
            "sample": shadow.sample if shadow and seen else 0.0,
        }
    return {
        "share": leg.share,
        "mirror": leg.mirror,
        "sample": leg.sample if leg.live else 0.0,
    }


def effects_of(
    course: Sequence[Leg], before: State | None, after: State, decided: Found | None
) -> tuple[Effect, ...]:
    """What is told of a change: the route where it is another, people where a status is."""
    found: list[Effect] = []
    body = _body(course, before, after, decided)
    if before is None or route_of(course, before) != route_of(course, after):
        found.append(Effect("route", f"{after.run}:{after.turn}:route", body))
    if before is None or _told(before) != _told(after) or _waived(before, after):
        found.append(Effect("notify", f"{after.run}:{after.turn}:notify", body))
    known = before.asked if before is not None else ()
    for text in after.asked:
        action, _, whom = text.partition(": ")
        if action == "page" and text not in known:
            paged = {**body, "to": whom}
            found.append(Effect("page", f"{after.run}:{after.turn}:page:{whom}", paged))
    return tuple(found)


def _told(state: State) -> tuple[object, ...]:
    """What people hear of when it changes; the reason alone does with every number."""
    return state.status, state.leg, state.approved


def _waived(before: State, after: State) -> bool:
    return not set(after.overrides) <= set(before.overrides)


def _body(
    course: Sequence[Leg], before: State | None, after: State, decided: Found | None
) -> dict[str, Any]:
    leg = course[after.leg]
    numbers = None
    if decided is not None:
        names = ("value", "low", "high", "limit", "n", "units", "outcome", "note")
        numbers = {"cell": decided.name, **{n: asdict(decided)[n] for n in names}}
    return {
        "run": after.run,
        "leg": leg.name if leg.stage != "full" else f"full-{after.span}",
        "stage": leg.stage,
        "status": after.status,
        "from": course[before.leg].name if before is not None else None,
        **route_of(course, after),
        "why": after.why,
        "decided": numbers,
        "at": after.seen,
        "turn": after.turn,
    }
