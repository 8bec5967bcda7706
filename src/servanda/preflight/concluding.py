# The outcome of a drill, from what was seen.

from __future__ import annotations

from collections.abc import Sequence

from servanda.preflight.naming import CAUSES, cause_of
from servanda.preflight.result import AsFound, Outcome, Poisoned, Preflight, Response

_FARTHER = 2.0  # times, after a sync of unchanged weights: it damages them
_BEYOND = 3.0  # times a side's own noise: by less nothing has moved
_LEAST = 1e-4  # nats; damage that is less is none


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
        min(found.moved, found.idle) > _BEYOND * noise
        and found.idle > _FARTHER * found.distance
        and found.idle - found.distance > _LEAST
    )
    layers = len({group.layer for group in groups if group.layer is not None})
    adapted = any(group.kind == "adapter" for group in groups)
    cause = cause_of(found, poison, groups, adapted=adapted, damaged=damaged, layers=layers)
    limit = max(_BEYOND * found.engine_noise, found.floor)
    if not cause and returned > limit:
        cause = "not_returned"
    unseen = [group.name for group in groups if group.mark == "unseen"]
    outcome: Outcome = "violated" if cause else "holds"
    # noise that hardly moves the trainer says nothing, and takes nothing from groups that follow
    if not cause and (unseen or poison.mark == "violated"):
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
    outcome: Outcome,
    cause: str,
    groups: Sequence[Response],
    unseen: Sequence[str],
) -> str:
    if outcome == "violated":
        wrong = [group.name for group in groups if group.mark == "violated"]
        if not wrong:
            return CAUSES[cause]
        which = f"{len(wrong)} of {len(groups)} groups: {_few(wrong)}"
        return f"{CAUSES[cause]} ({which})"
    if outcome == "inconclusive":
        if unseen:
            which = f"{len(unseen)} of {len(groups)} groups"
            return f"{which} move nothing that could be seen: {_few(unseen)}"
        return "each group follows by itself, and all at once they do not"
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
