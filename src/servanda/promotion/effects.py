# Effects: what the world is told of a change, each with a key of its own.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servanda.contract.stages import Leg
from servanda.promotion.state import Asked, Effect, Found, State, leg_of
from servanda.traces.serialization import to_plain


def route_of(course: Sequence[Leg], state: State) -> dict[str, float]:
    """Who serves: the share of infer, what is mirrored to it, what is scored of its answers.

    A run that is rolled back keeps its shadow, for what went wrong is to be seen.  Evidence that
    expires says nothing against a kernel that serves everybody: there the route stays.
    """
    leg = course[state.leg]
    kept = leg.stage == "full" and state.status == "superseded" and state.expired
    if state.ended and not kept:
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
    course: Sequence[Leg],
    before: State | None,
    after: State,
    decided: Found | None,
    asked: Sequence[Asked] = (),
) -> tuple[Effect, ...]:
    """What is told of a change: the route where it is another, people where a status is.

    Args:
        asked: what rules ask for now; whoever they name is paged once when one begins to be met.
    """
    found: list[Effect] = []
    body = _body(course, before, after, decided)
    if before is None or _served(course, before) != _served(course, after):
        found.append(Effect("route", f"{after.run}:{after.turn}:route", body))
    if before is None or _told(before) != _told(after) or _waived(before, after):
        found.append(Effect("notify", f"{after.run}:{after.turn}:notify", body))
    known = before.asked if before is not None else ()
    begun = [one for one in asked if one.action == "page" and str(one) not in known]
    for whom in dict.fromkeys(one.value for one in begun):
        rules = [one.rule for one in begun if one.value == whom]
        paged = {**body, "to": whom, "for": [*dict.fromkeys(rules)]}
        found.append(Effect("page", f"{after.run}:{after.turn}:page:{whom}", paged))
    return tuple(found)


def _served(course: Sequence[Leg], state: State) -> tuple[str, dict[str, float]]:
    """What a proxy has to know: who serves, and as which leg it logs that."""
    return leg_of(course, state).name, route_of(course, state)


def _told(state: State) -> tuple[object, ...]:
    """What people hear of when it changes; the reason alone does with every number."""
    return state.status, state.leg, state.approved


def _waived(before: State, after: State) -> bool:
    return not set(after.overrides) <= set(before.overrides)


def _body(
    course: Sequence[Leg], before: State | None, after: State, decided: Found | None
) -> dict[str, Any]:
    leg = leg_of(course, after)
    numbers = None
    if decided is not None:
        names = ("value", "low", "high", "limit", "n", "units", "outcome", "note")
        numbers = to_plain({"cell": decided.name, **{n: getattr(decided, n) for n in names}})
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
