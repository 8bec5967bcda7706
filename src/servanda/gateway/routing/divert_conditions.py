# The conditions of a diversion besides evidence.
#
# Anything unknown counts as a missing condition: the capacity of stable has to be declared and
# its load measured.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from servanda.contract.model import WHOLE
from servanda.gateway.routing.evidence_price import CellEvidence
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.snapshot import acts
from servanda.gateway.routing.state import Rules, SliceState, TrafficFacts

# seconds for which the measured load of stable may lack newly diverted traffic
SETTLE_S = 60.0


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
