# Builds a status from the parts of a controller.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from servanda.gateway.controller.gateways import Gateways
from servanda.gateway.controller.status import CellStatus, SliceStatus, SplitStatus, UnwatchedCell
from servanda.gateway.routing.evidence_price import evidence_within, log_above, mean
from servanda.gateway.routing.model import AWAY, SliceRoute
from servanda.gateway.routing.snapshot import acts
from servanda.gateway.routing.split_record import SplitRecord
from servanda.gateway.routing.state import RoutingState, Rules, SliceState, Track, WatchedCell
from servanda.judgement.breakdown import Advice
from servanda.traces.assignments import BREAKER, FAILOVER

_ERRORS = 2.0  # standard errors on each side of an estimate


def slices_of(
    rules: Rules,
    state: RoutingState,
    routes: Sequence[SliceRoute],
    *,
    floors: Mapping[tuple[str, str], float],
    gateways: Gateways,
    advice: Mapping[str, Advice],
    now: float,
) -> tuple[SliceStatus, ...]:
    """Every slice, in the order of the snapshot."""
    shares = gateways.shares(now)
    served = gateways.served()
    by_name = {route.name: route for route in routes}
    return tuple(
        SliceStatus(
            name=slice_.name,
            status=slice_.status,
            since=slice_.since,
            acts=acts(rules, slice_),
            held=slice_.held,
            pin=slice_.pin,
            route=by_name[slice_.name].share if slice_.name in by_name else 1.0,
            share=shares.get(slice_.name),
            served=served.get(slice_.name, {}),
            cells=cells_of(rules, slice_, floors),
            keys=len(slice_.keys),
            scored=slice_.scored,
            sample=by_name[slice_.name].sample if slice_.name in by_name else 0.0,
            relapses=slice_.relapses,
            advice=advice.get(slice_.name),
        )
        for slice_ in state.slices.values()
    )


def split_of(rules: Rules, split: SplitRecord | None) -> SplitStatus | None:
    """The users of a promotion's step."""
    if split is None:
        return None
    return SplitStatus(
        leg=split.leg,
        planned=split.planned,
        users=split.users,
        infer=split.infer,
        failover=split.causes[FAILOVER],
        breaker=split.causes[BREAKER],
        apart=dict(split.apart),
        log_evidence=split.log_e,
        log_price=math.log(rules.policy.enter_evidence),
    )


def cells_of(
    rules: Rules, slice_: SliceState, floors: Mapping[tuple[str, str], float]
) -> tuple[CellStatus, ...]:
    """The cells of one slice, in the order of the contract."""
    return tuple(_cell(rules, cell, slice_, floors) for cell in rules.on(slice_.name))


def _cell(
    rules: Rules,
    cell: WatchedCell,
    slice_: SliceState,
    floors: Mapping[tuple[str, str], float],
) -> CellStatus:
    policy, track = rules.policy, slice_.track(cell.clause)
    back = evidence_within(rules, cell, track, slice_.doubts.get(cell.clause))
    enter = math.log(policy.enter_evidence * rules.cells)
    floor = floors.get((cell.clause, cell.slice))
    met = bool(track.above)
    return CellStatus(
        clause=cell.clause,
        limit=cell.low + cell.scale * cell.limit,
        unit=cell.unit,
        value=cell.low + cell.scale * track.weighted / track.weights if track.weights > 0 else None,
        interval=_interval(cell, track),
        floor=None if floor is None else cell.low + cell.scale * floor,
        log_evidence=log_above(cell, track.above) if met else 0.0,
        log_price=enter,
        log_alarm=log_above(cell, track.alarm) if met else -math.inf,
        log_alarm_price=enter + math.log(policy.horizon),
        log_below=back.log_evidence,
        log_leave_price=back.log_price,
        n=track.n,
        missing=track.missing,
        diverts=cell.diverts,
        critical=cell.critical,
        refutes=cell.refutes,
    )


def _interval(cell: WatchedCell, track: Track) -> tuple[float, float] | None:
    """Approximate: as for independent Bernoulli samples, which have the largest variance."""
    if cell.refutes or track.weights <= 0 or not track.tokens:
        return None
    center = min(1.0, max(0.0, mean(track)))
    error = _ERRORS * math.sqrt(center * (1 - center) / track.tokens)
    low, high = max(0.0, center - error), min(1.0, center + error)
    return cell.low + cell.scale * low, cell.low + cell.scale * high


def undrawn(rules: Rules, state: RoutingState) -> tuple[UnwatchedCell, ...]:
    """Slices with scored requests whose sampler could not be tested."""
    why = "the infer kernel reports no top-k logprobs"
    scored = [c for c in rules.watched if c.refutes and state.slices[c.slice].scored]
    blind = [c for c in scored if not state.slices[c.slice].track(c.clause).tokens]
    if blind and blind == scored:
        return (UnwatchedCell(blind[0].clause, "any slice", why),)
    return tuple(UnwatchedCell(cell.clause, cell.slice, why) for cell in blind)


def diverted(state: RoutingState, shares: Mapping[str, float]) -> float:
    """Share of all traffic that slices divert from infer; slices that overlap are added."""
    away = (slice_.name for slice_ in state.slices.values() if slice_.status in AWAY)
    return min(1.0, math.fsum(shares.get(name, 0.0) for name in away))
