# The machine of routing: a state, and what moves it.
#
# Everything is a value and every function is pure: time comes as an argument, and the same
# scores and evaluations in the same order make the same state.  `absorb` only gathers evidence; a
# slice moves in `transition.advance`, a person moves it by `pin`.

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

_AT_LEAST = 2  # requests that every key may have
_RUNS = 32  # of promotions, whose last turn is known


def begin(rules: Rules, *, now: float) -> RoutingState:
    """Every slice active and without evidence."""
    slices = {name: SliceState(name, since=now) for name in cuts(rules)}
    return RoutingState(slices=slices, clock=now)


def absorb(rules: Rules, state: RoutingState, score: Score) -> RoutingState:
    """The state with the evidence of one scored request.

    One key may not fill a slice's evidence: where it has its part already, its request is
    passed over.  That is decided by counts alone, before anyone looks at what was scored, so
    it chooses no outcomes.
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
    """How many of a slice's latest requests are known by their keys.

    Enough to find the users that are asked for among them, where some ask more than others.
    """
    return max(128, 8 * rules.policy.keys)


def _filled(rules: Rules, slice_: SliceState, key: str) -> bool:
    """Whether a key has its part of the latest evidence: a quarter, or more where fewer users
    than four are enough for the contract.

    Of the latest: a million requests of others long ago are no leave to fill what comes now.
    Of requests that do not say who asked no one knows whether they are of one user: they are
    evidence, and no user of those that leaving needs.
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
    """The state after a person's word about one slice.

    Args:
        pin: None takes back the one that there is; where there is none, nothing happens.

    Raises:
        ContractError: there is no such slice, the pin is over already, or it asks for stable
            where the contract declares none.
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
    """The state under other rules: a slice stays where it is, by its name.

    New slices are active, and slices that are gone are left out.

    Args:
        keep: whether evidence so far still concerns these rules; else it begins anew.
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
    """The state by a clock that says now, where the one that it was made by was ahead of it.

    Everything lasts as long as it would have; else it would stand still until then.
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
    """The state with a promotion's route; the same state, where it had this one or a later one.

    Args:
        share: of all traffic that infer serves; None: what the contract says.
        mirror: of the others, what infer is asked as well.
        sample: of what infer answers, or is asked as well, what the promotion asks a row of.
        turn: of the run; a larger one is later.  None: anyone who says it means now.
    """
    if turn is not None:
        if turn <= state.turns.get(run, -1):
            return state
        others = {name: last for name, last in state.turns.items() if name != run}
        state = replace(state, turns=dict([*others.items(), (run, turn)][-_RUNS:]))
    return replace(state, base=share, mirror=mirror, sample=sample, run=run, leg=leg)
