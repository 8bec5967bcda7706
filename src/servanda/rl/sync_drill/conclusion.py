# The outcome of a preflight sync test, from its measurements.

from __future__ import annotations

from collections.abc import Iterator, Sequence

from servanda.judgement.verdict import BlindSpot
from servanda.report.format import count
from servanda.rl.sync_drill.diagnosis import CAUSES, cause_of
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.result import Baseline, Outcome, PoisonResult, Response
from servanda.rl.sync_drill.stream import StreamNames


def conclude(
    baseline: Baseline,
    poison: PoisonResult,
    groups: Sequence[Response],
    *,
    returned: float,
    back_late: int,
    syncs: int,
    tokens: int,
    seconds: float,
    unprobed: int | None,
    stream: StreamNames | None = None,
) -> Preflight:
    """Judge the measurements; the arguments are those of Preflight.

    Args:
        unprobed: ids of the vocabulary that no probe contains; None if its size is unknown.
    """
    layers = len({group.layer for group in groups if group.layer is not None})
    adapted = any(group.kind == "adapter" for group in groups)
    cause = cause_of(baseline, poison, groups, adapted=adapted, layers=layers)
    # an engine may want another layout: where it follows as it should, the stream is right
    if stream and stream.misplaced and cause in ("sync_moves", "unfaithful"):
        cause = "misplaced"
    back = returned <= baseline.near
    if not cause and back_late:
        cause = "dropped" if back else "not_returned"
    unseen = [group.name for group in groups if group.mark == "unseen"]
    shaky = [group.name for group in groups if group.mark == "warns"]
    outcome: Outcome = "violated" if cause else "holds"
    # noise that hardly changes the trainer is no evidence, also not against synced groups
    if not cause and (unseen or shaky or poison.mark == "violated"):
        outcome = "inconclusive"
    return Preflight(
        outcome=outcome,
        cause=cause,
        sentence=_violated(cause, baseline, poison, groups, back_late)
        if cause
        else _not_violated(outcome, groups, unseen, shaky),
        found=baseline,
        poison=poison,
        groups=tuple(groups),
        returned=returned,
        back=back,
        back_late=back_late,
        syncs=syncs,
        tokens=tokens,
        seconds=seconds,
        warnings=(*_warnings(baseline, shaky, cause), *_of_the_stream(stream, cause)),
        blind_spots=tuple(_blind_spots(groups, unprobed)),
        stream=stream,
    )


def _not_violated(
    outcome: Outcome, groups: Sequence[Response], unseen: Sequence[str], shaky: Sequence[str]
) -> str:
    if outcome == "holds":
        return f"every trained weight reaches the engine: all {len(groups)} groups are synced"
    if unseen:
        which = f"{len(unseen)} of {count(len(groups), 'group')}"
        return f"{which} cannot be judged, they hardly change any logprob: {_few(unseen)}"
    if shaky:
        return f"response slope neither right nor clearly wrong: {_few(shaky)}"
    return "each group alone is synced, but all of them randomised at once are not"


def _violated(
    cause: str,
    baseline: Baseline,
    poison: PoisonResult,
    groups: Sequence[Response],
    back_late: int,
) -> str:
    wrong = [group for group in groups if group.mark == "violated"]
    sentence = CAUSES[cause]
    if cause in ("late", "dropped"):
        late = max([poison.late, back_late, *(group.late for group in wrong)])
        sentence += f" ({count(late, 'sync')} later)"
    if cause in ("shard_stale", "experts_stale"):
        sentence += f": {_few([*dict.fromkeys(name for group in wrong for name in group.lost)])}"
    if cause == "scaled" and baseline.scale:
        sentence += f": {baseline.scale}"
    elif cause == "scaled":
        scales = [group.scale for group in wrong if group.scale]
        low, high = min(s.low for s in scales), max(s.high for s in scales)
        mean = sum(s.factor for s in scales) / len(scales)
        sentence += f": {mean:.3g} [{low:.3g}, {high:.3g}]"
    if cause == "sync_moves":
        sentence += (
            f" (mean |Δ logp| {baseline.distance:.2g} before, {baseline.idle:.2g} nats after)"
        )
    if wrong:
        which = [group.name for group in wrong]
        sentence += f" ({len(wrong)} of {count(len(groups), 'group')}: {_few(which)})"
    return sentence


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _warnings(baseline: Baseline, shaky: Sequence[str], cause: str) -> Iterator[str]:
    if shaky and cause:
        yield f"response slope neither right nor clearly wrong: {_few(shaky)}"
    if baseline.distance > 2 * baseline.idle and not cause:
        yield "the engine had other weights before the first sync"


def _of_the_stream(stream: StreamNames | None, cause: str) -> Iterator[str]:
    if stream and stream.missing and not cause:
        yield (
            f"synced, though no name in the stream stands for them: {_few(stream.missing)}; pass "
            "their names as Stream(names=...)"
        )


def _blind_spots(groups: Sequence[Response], unprobed: int | None) -> Iterator[BlindSpot]:
    if unprobed is None:
        text = "the vocabulary size is unknown, so vocabulary rows in no probe are not tested"
        yield BlindSpot("rows", text)
    elif unprobed > 0:
        yield BlindSpot(
            "rows",
            f"{unprobed:,} vocabulary ids occur in no probe: a single one of their rows that is "
            "not synced goes unnoticed",
        )
    unseen = [
        (f"{part.name} of {group.name}", part.moved > 0)
        for group in groups
        if group.mark == "holds" or group.lost
        for part in group.parts
        if part.unseen
    ]
    if faint := [name for name, moves in unseen if moves]:
        yield BlindSpot(
            "sample",
            "some parts change too few logprobs to be told from the rest of their group: "
            f"{_few(faint)}",
        )
    if idle := [name for name, moves in unseen if not moves]:
        yield BlindSpot(
            "sample",
            "no probe token changes with some parts, such as an expert that none is routed to: "
            f"{_few(idle)}; pass rows that reach them as tokens=",
        )
