# What a slice needs before it may leave infer, besides evidence.
#
# Everything that is not known counts as missing: stable's room is a number that somebody
# declared and somebody measured, or there is none.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from servanda.contract.model import WHOLE
from servanda.gateway.routing.evidence_price import Weighed
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.snapshot import acts
from servanda.gateway.routing.state import Facts, Rules, SliceState

# seconds in which what stable was measured to answer may not yet have what was just brought
SETTLE_S = 60.0


def missing(
    rules: Rules,
    slices: Mapping[str, SliceState],
    facts: Facts,
    *,
    one: SliceState,
    paid: Sequence[Weighed],
    moved: SliceState,
    exempt: bool,
) -> dict[str, str]:
    """What is missing before `moved` may go to stable: kind -> sentence; {} of nothing.

    Args:
        one: the slice whose evidence it is; paid: that evidence, cell by cell.
        moved: the slice itself, or the whole where a rule diverts all.
        exempt: whether the breaker lets it pass, since a rule diverts all.
    """
    found = {
        "pin": _pin(one) or _pin(moved),
        "keys": _keys(rules, one),
        "floor": _floor(facts, paid),
        "room": _room(rules, slices, facts, moved),
        "share": "" if exempt else _share(rules, slices, facts, moved),
    }
    return {kind: said for kind, said in found.items() if said}


def _pin(one: SliceState) -> str:
    if one.pin is None or one.pin.to not in ("stable", "infer"):
        return ""
    return f"{one.name} is pinned to {one.pin.to} by {one.pin.actor}"


def _keys(rules: Rules, one: SliceState) -> str:
    has, needs = len(one.keys), rules.policy.keys
    return "" if has >= needs else f"the evidence has {has} distinct keys, and needs {needs}"


def _floor(facts: Facts, paid: Sequence[Weighed]) -> str:
    """A limit that the referee does not keep against itself says nothing about infer.

    One cell whose limit says something is enough.
    """
    said = ""
    for cell in (w.cell for w in paid):
        floor = facts.floors.get((cell.clause, cell.slice))
        if floor is None or 2 * floor <= cell.limit:
            return ""
        at, limit = (cell.low + cell.scale * x for x in (floor, cell.limit))
        said = said or (
            f"train is at {at:.3g} against itself, and twice that is beyond the limit {limit:.3g}"
        )
    return said


def _room(rules: Rules, slices: Mapping[str, SliceState], facts: Facts, moved: SliceState) -> str:
    """Whether stable can answer what the slice brings, beside what it answers at its most."""
    declared, peak = rules.policy.stable_in_flight, facts.stable_in_flight
    brings = facts.in_flight.get(moved.name)
    if rules.contract.stable is None:
        return "the contract declares no stable: kernel"
    if declared is None:
        return "routing.stable_in_flight is not declared: nobody knows what stable can take"
    if peak is None or math.isnan(peak):
        return "what stable answers at a time is not measured"
    if brings is None or math.isnan(brings):
        return f"what infer answers of {moved.name} at a time is not measured"
    coming = math.fsum(_coming(rules, one, facts.now) for one in slices.values())
    if peak + coming + brings <= declared:
        return ""
    more = f" and {coming:.3g} on their way" if coming else ""
    return (
        f"stable has no room: {peak:.3g} requests at a time{more}, {brings:.3g} more would come, "
        f"and it can answer {declared}"
    )


def _coming(rules: Rules, one: SliceState, now: float) -> float:
    """What a slice brings to stable that was not measured there yet.

    Where nothing is done of what is decided, it never will be: then all of it counts.
    """
    if one.status not in AWAY:
        return 0.0
    settled = one.status == "probation" or now >= one.since + SETTLE_S
    return 0.0 if settled and acts(rules, one) else one.load


def _share(rules: Rules, slices: Mapping[str, SliceState], facts: Facts, moved: SliceState) -> str:
    """The breaker: where more than so much is beyond its limit, it is no matter of slices.

    Shares of slices that overlap are added as if they did not: that errs towards holding.
    """
    if moved.status == "recovering" or slices[WHOLE].status in AWAY:
        return ""  # it counts as diverted already
    share = facts.shares.get(moved.name)
    if share is None or math.isnan(share):
        return f"the share of {moved.name} of the traffic is not measured"
    away = [one.name for one in slices.values() if one.status in (*AWAY, "recovering")]
    before = min(1.0, math.fsum(facts.shares.get(name, 0.0) for name in away))
    most = rules.policy.most_diverted
    if before + share <= most:
        return ""
    return (
        f"{before:.3g} of all traffic is diverted, {share:.3g} more would come, and "
        f"routing.most_diverted is {most:.3g}"
    )
