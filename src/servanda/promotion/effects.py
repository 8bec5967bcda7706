# Effects: the notifications of a change, each with a key of its own.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servanda.contract.stages import Leg
from servanda.promotion.state import CellResult, Effect, RuleAction, State, leg_of
from servanda.traces.serialization import to_plain


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
