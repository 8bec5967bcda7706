# The transcript of a drill.

from __future__ import annotations

import math
from collections.abc import Iterator

from servanda.preflight.result import Mark, Preflight, Response

_MARKS: dict[Mark, str] = {"holds": "✓", "warns": "!", "violated": "✗", "unseen": "?"}
_COLUMNS, _WIDTH = 3, 96


def told(result: Preflight) -> str:
    """What was done, what was seen, and what follows, in a dozen lines."""
    return "\n".join(_lines(result))


def _lines(result: Preflight) -> Iterator[str]:
    found, poison = result.found, result.poison
    yield (
        f"found    mean |d| {_nats(found.distance)} nats on {result.tokens:,} probe tokens; "
        f"after a sync of unchanged weights {_nats(found.idle)}"
    )
    if found.cast:
        yield f"         what is left is what rounding weights to {found.cast} does"
    yield (
        f"poison   all trained weights randomised, one sync: mean |d| {_nats(poison.distance)} "
        f"nats, limit {_nats(poison.limit)} (floor {_nats(found.floor)})  {_MARKS[poison.mark]}"
    )
    if poison.fresh is not None:
        yield f"         on tokens that were not scored before: {_nats(poison.fresh)}"
    label = "nudge"
    for line in _table([_cell(r) for r in _shown(result)]):
        yield f"{label:<9}{line}"
        label = ""
    for response in result.groups:
        if response.mark in ("warns", "violated"):
            yield f"         {_closer(response)}"
    for warning in result.warnings:
        yield f"warning  {warning}"
    yield f"{result.outcome.upper()}: {result.sentence}"
    if result.outcome == "violated":
        yield "Rewards, losses and the logprobs of the first step would have looked healthy."
    yield (
        f"weights restored bit for bit, engine within {_nats(result.returned)} nats of before · "
        f"{result.syncs} syncs · exit {result.exit_code} · {result.seconds:.0f} s"
    )


def _shown(result: Preflight) -> list[Response | list[Response]]:
    """Groups one by one, and those of a block that is right as one."""
    blocks: dict[str, list[Response]] = {}
    for response in result.groups:
        blocks.setdefault(response.block, []).append(response)
    return [*blocks.values()]


def _cell(responses: list[Response]) -> str:
    name = responses[0].block
    marks = [response.mark for response in responses]
    worst = next(m for m in ("violated", "unseen", "warns", "holds") if m in marks)
    follows = [r.follow for r in responses if not math.isnan(r.follow)]
    if not follows:
        return f"{name} {_MARKS['unseen']} not visible"
    low, high = min(follows), max(follows)
    span = f"{low:.2f}" if len(responses) == 1 else f"{low:.2f}..{high:.2f}"
    return f"{name} {_MARKS[worst]} {span}"


def _closer(response: Response) -> str:
    deaf = [part.name for part in response.parts if part.deaf]
    told = (
        f"{response.name}: follows {response.follow:.2f}, residual {response.residual:.1f} floors"
    )
    if response.deaf:
        told += ", never reaches the engine"
    elif deaf:
        told += f"; deaf in {', '.join(deaf[:4])}"
    return told


def _table(cells: list[str]) -> Iterator[str]:
    width = max(map(len, cells)) + 3
    columns = max(1, _WIDTH // width)
    for start in range(0, len(cells), columns):
        yield "".join(f"{cell:<{width}}" for cell in cells[start : start + columns]).rstrip()


def _nats(value: float) -> str:
    return f"{value:.2g}" if value else "0"
