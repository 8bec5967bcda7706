# The outcome of a drill, from what was seen.

from __future__ import annotations

from collections.abc import Sequence

from servanda.preflight.naming import CAUSES, cause_of
from servanda.preflight.result import (
    RESIDUAL_WARNS,
    AsFound,
    Outcome,
    Poisoned,
    Preflight,
    Response,
)

_DAMAGE = 2.0  # times farther apart after a sync of unchanged weights than before


def concluded(
    found: AsFound,
    poison: Poisoned,
    groups: Sequence[Response],
    *,
    returned: float,
    syncs: int,
    tokens: int,
    seconds: float,
) -> Preflight:
    """Judge what was seen; see Preflight for the arguments."""
    noise = max(found.engine_noise, found.train_noise)
    damaged = (
        found.moved > RESIDUAL_WARNS * noise
        and found.idle > _DAMAGE * max(found.distance, noise)
        and found.idle > RESIDUAL_WARNS * noise
    )
    damaged = damaged and found.idle - found.distance > 1e-4
    layers = len({group.layer for group in groups if group.layer is not None})
    adapted = any(group.kind == "adapter" for group in groups)
    cause = cause_of(found, poison, groups, adapted=adapted, damaged=damaged, layers=layers)
    limit = max(RESIDUAL_WARNS * found.engine_noise, found.floor)
    if not cause and returned > limit:
        cause = "not_returned"
    unseen = [group.name for group in groups if group.mark == "unseen"]
    outcome: Outcome = "violated" if cause else "holds"
    if not cause and (unseen or poison.mark == "unseen"):
        outcome = "inconclusive"
    return Preflight(
        outcome=outcome,
        cause=cause,
        sentence=_sentence(outcome, cause, groups, unseen),
        found=found,
        poison=poison,
        groups=tuple(groups),
        returned=returned,
        syncs=syncs,
        tokens=tokens,
        seconds=seconds,
        warnings=_warnings(found, groups, cause),
    )


def _sentence(
    outcome: Outcome, cause: str, groups: Sequence[Response], unseen: Sequence[str]
) -> str:
    if outcome == "violated":
        deaf = [group.name for group in groups if group.mark == "violated"]
        count = f"{len(deaf)} of {len(groups)} groups" if deaf else "no group is deaf"
        return f"{CAUSES[cause]} ({count}{': ' + _few(deaf) if deaf else ''})"
    if outcome == "inconclusive":
        if not unseen:
            return "the trainer's own scores hardly moved, so nothing could be seen"
        return (
            f"{len(unseen)} of {len(groups)} groups move nothing that could be seen: {_few(unseen)}"
        )
    return f"what the trainer updates reaches the engine: all {len(groups)} groups follow"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _warnings(found: AsFound, groups: Sequence[Response], cause: str) -> tuple[str, ...]:
    told = []
    shaky = [group.name for group in groups if group.mark == "warns"]
    if shaky:
        told.append(f"neither right nor wrong: {_few(shaky)}")
    if found.distance > 2 * found.idle and not cause:
        told.append("the engine had other weights before the first sync")
    return tuple(told)
