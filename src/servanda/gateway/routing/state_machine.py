# The state machine of routing.
#
# All functions are pure: time is an argument, and the same scores and evaluations in the same order
# give the same state.  `absorb` only adds evidence; `transition.advance` moves slices, and `pin` is
# the action of a person.

from __future__ import annotations

from dataclasses import replace

from servanda.errors import ContractError
from servanda.gateway.routing.evidence_price import LATELY, add_request
from servanda.gateway.routing.model import Pin
from servanda.gateway.routing.snapshot import cuts
from servanda.gateway.routing.state import (
    RoutingState,
    Rules,
    Score,
    SliceState,
    Track,
    Transition,
    WatchedCell,
    status_text,
    without_evidence,
)
from servanda.registry import did_you_mean

_AT_LEAST = 2  # requests that every user may contribute
_RUNS = 32  # promotions whose last revision is kept


def begin(rules: Rules, *, now: float) -> RoutingState:
    """Every slice active and without evidence."""
    slices = {name: SliceState(name, since=now) for name in cuts(rules)}
    return RoutingState(slices=slices, clock=now)


def absorb(rules: Rules, state: RoutingState, score: Score) -> RoutingState:
    """The state with the evidence of one scored request.

    One user may not dominate a slice's evidence: beyond its part, its requests are excluded. This
    is decided by counts alone, before the scores are examined, so it selects no outcomes.
    """
    slices = dict(state.slices)
    by_slice: dict[str, list[WatchedCell]] = {}
    for cell in rules.watched:
        if (cell.clause, cell.slice) in score.statistics and cell.slice in slices:
            by_slice.setdefault(cell.slice, []).append(cell)
    for name, cells in by_slice.items():
        chance = score.chance if score.drawn is None else score.drawn.get(name)
        if chance is not None:
            slices[name] = _with(rules, slices[name], score, cells, chance)
    return replace(state, slices=slices)


def _with(
    rules: Rules, slice_: SliceState, score: Score, cells: list[WatchedCell], chance: float
) -> SliceState:
    statistics = [(cell, score.statistics[cell.clause, cell.slice]) for cell in cells]
    if not any(statistic.n for _, statistic in statistics):
        return slice_
    if _filled(rules, slice_, score.key):
        return replace(slice_, passed=slice_.passed + 1)
    tracks = dict(slice_.tracks)
    for cell, statistic in statistics:
        track = tracks.get(cell.clause, Track())
        tracks[cell.clause] = add_request(track, statistic, cell.limit, chance)
    recent = (*slice_.recent, score.key)[-remembered(rules) :]
    misread = slice_.misread + (score.misread - slice_.misread) / LATELY
    return replace(slice_, tracks=tracks, recent=recent, misread=misread, scored=slice_.scored + 1)


def remembered(rules: Rules) -> int:
    """The number of a slice's latest requests whose users are kept.

    Enough to find the required users among them, if some send more than others.
    """
    return max(128, 8 * rules.policy.keys)


def _filled(rules: Rules, slice_: SliceState, key: str) -> bool:
    """Whether a user has its part of the latest evidence: 25 %, or more if the contract needs fewer
    than four users.

    Of the latest: a million earlier requests of others do not permit dominating new evidence.
    Requests without a user are evidence, but do not count as users for a diversion.
    """
    if not key:
        return False
    had = slice_.recent.count(key)
    return had > max(_AT_LEAST, len(slice_.recent) / rules.parts)


def pin(
    rules: Rules,
    state: RoutingState,
    slice: str,
    pin: Pin | None,
    *,
    actor: str,
    reason: str,
    now: float,
) -> tuple[RoutingState, tuple[Transition, ...]]:
    """The state after a person pins or releases one slice.

    Args:
        pin: None releases the current pin, if any.

    Raises:
        ContractError: no such slice, an expired pin, or a pin to stable without a stable kernel.
    """
    if slice not in state.slices:
        hint = did_you_mean(slice, state.slices)
        raise ContractError(f"no slice is named {slice!r}", hint=hint)
    now = max(now, state.clock)
    if pin is not None and pin.expires <= now:
        raise ContractError(
            f"the pin of {slice} would expire before it begins",
            hint="give it a time to live, such as 24h",
        )
    if pin is not None and pin.to in ("stable", "enforce") and rules.contract.stable is None:
        raise ContractError(
            f"{slice} cannot be pinned to {pin.to}: there is no stable: kernel",
            hint="declare stable: the kernel that serves diverted requests",
        )
    before = state.slices[slice]
    if before.pin == pin:
        return replace(state, clock=now), ()
    after = replace(before, pin=pin)
    change = Transition(
        number=state.transitions + 1,
        at=now,
        slice=slice,
        before=status_text(before),
        after=status_text(after),
        acted=True,
        reason=reason,
        n=after.scored,
        keys=len(after.keys),
        actor=actor,
    )
    slices = {**state.slices, slice: after}
    return replace(state, slices=slices, transitions=change.number, clock=now), (change,)


def rebase(rules: Rules, state: RoutingState, *, now: float, keep: bool) -> RoutingState:
    """The state under other rules: slices keep their status, by name.

    New slices are active, and slices that are gone are left out.

    Args:
        keep: whether the evidence so far is valid under these rules; otherwise it restarts.
    """
    now = max(now, state.clock)
    slices: dict[str, SliceState] = {}
    for name in cuts(rules):
        slice_ = state.slices.get(name, SliceState(name, since=now))
        clauses = {cell.clause for cell in rules.on(name)}
        if keep:
            tracks = {c: track for c, track in slice_.tracks.items() if c in clauses}
            slices[name] = replace(slice_, tracks=tracks)
        else:
            slices[name] = without_evidence(slice_)
    return replace(state, slices=slices, clock=now)


def set_back(state: RoutingState, *, now: float) -> RoutingState:
    """The state moved back to the current clock, if it was made with a clock that was ahead.

    All durations are kept; otherwise the state would stand still until then.
    """
    ahead = state.clock - now
    if ahead <= 0:
        return state
    slices = {
        name: replace(
            slice_,
            since=slice_.since - ahead,
            step_since=slice_.step_since - ahead,
            moves=tuple(at - ahead for at in slice_.moves),
            calm=None if slice_.calm is None else slice_.calm - ahead,
            pin=None
            if slice_.pin is None
            else replace(slice_.pin, expires=slice_.pin.expires - ahead),
        )
        for name, slice_ in state.slices.items()
    }
    return replace(state, slices=slices, clock=now)


def with_route(
    state: RoutingState,
    *,
    share: float | None,
    mirror: float,
    run: str,
    leg: str,
    sample: float = 0.0,
    turn: int | None = None,
) -> RoutingState:
    """The state with a promotion's route; unchanged if it has this revision or a later one.

    Args:
        share: share of all traffic that infer serves; None: the contract's.
        mirror: share of the other requests that is mirrored to infer.
        sample: share of infer's responses, mirrored ones included, that the promotion logs.
        turn: revision of the run; larger is later.  None: applied unconditionally.
    """
    if turn is not None:
        if turn <= state.turns.get(run, -1):
            return state
        others = {name: last for name, last in state.turns.items() if name != run}
        state = replace(state, turns=dict([*others.items(), (run, turn)][-_RUNS:]))
    return replace(state, base=share, mirror=mirror, sample=sample, run=run, leg=leg)
