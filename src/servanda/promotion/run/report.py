# What is told of a run: its legs, the cell that decided each, and what to do next.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from servanda.contract.stages import Leg
from servanda.promotion.advance import judged
from servanda.promotion.effects import route_of
from servanda.promotion.run.history import Look, Story
from servanda.promotion.state import Found
from servanda.report.format import duration, line, number
from servanda.report.table import table
from servanda.traces.serialization import to_plain

_HEAD = ("stage", "traffic", "state", "groups", "decided by", "measured", "interval", "limit", "n")
_GLYPH = {"held": "✓", "violated": "✗", "to come": "·"}
_WIDEST = 40  # of a column; a longer name is cut


@dataclass(frozen=True)
class Row:
    """One leg of a run.

    Args:
        state: held, to come, or what the run's status says of the leg it is at.
        groups: of the latest look; None where nobody looked.
        decided: the cell that decided that look.
    """

    leg: Leg
    state: str
    groups: int | None
    decided: Found | None


def rows(story: Story) -> tuple[Row, ...]:
    """The legs of a run's course, with what the latest look at each found."""
    latest: dict[int, Look] = {}
    at = 0
    for look in story.looks:
        latest[at] = look
        at = look.state.leg
    found = []
    for i, leg in enumerate(story.course):
        look = latest.get(i)
        here = i == story.state.leg
        state = story.state.status.replace("_", " ") if here else "held"
        if i > story.state.leg:
            state = "to come"
        if here and look is not None and look.finding.error:
            state = "not measured"
        decided = judged(_counted(look))[1] if look is not None else None
        if decided is not None and not decided.n:
            decided = None  # nothing was counted, and nothing decided
        groups = look.finding.groups if look is not None and not look.finding.error else None
        found.append(Row(story.leg if here else leg, state, groups, decided))
    return tuple(found)


def text(story: Story, *, now: float) -> str:
    """A run for people: a row a leg, the status with its reason, and the next move."""
    head, *told_rows = table([_HEAD, *map(_cells, rows(story))], widest=_WIDEST)
    told = [f"{story.run}  {line(story.opened['kernels']['infer'])}"]
    told += [f"  {head}"]
    for i, (row, cells) in enumerate(zip(rows(story), told_rows, strict=True)):
        here = i == story.state.leg
        glyph = _GLYPH.get(row.state) or (_here(story) if here else " ")
        told += [f"{glyph} {cells}"]
    told += ["", f"{_status(story)}: {story.state.why}"]
    if story.state.ended:  # its row has the traffic that the leg would get
        told += [f"  infer serves {_served(story)}"]
    told += [f"  {waived}" for waived in _waived(story, now)]
    told += [f"  next: {move}" for move in _next(story)]
    return "\n".join(part.rstrip() for part in told)


def data(story: Story, *, now: float) -> dict[str, Any]:
    """A run as plain data for JSON."""
    state = story.state
    return {
        "run": story.run,
        "contract": story.opened["contract"],
        "kernels": story.opened["kernels"],
        "key": to_plain(state.key),
        "status": state.status,
        "stage": story.leg.stage,
        "leg": story.leg.name,
        "why": state.why,
        "since": state.since,
        "valid_until": state.valid_until,
        "route": route_of(story.course, state),
        "overrides": [to_plain(o) for o in state.overrides if o.expires > now],
        "legs": [
            {
                "leg": row.leg.name,
                "state": row.state,
                "groups": row.groups,
                "first": row.leg.first,
                "last": row.leg.last,
                "decided": to_plain(row.decided) if row.decided else None,
            }
            for row in rows(story)
        ],
        "entry": story.seq,
    }


def cell_text(cell: Found) -> str:
    """A cell with its interval and its n, in one line.

    >>> cell_text(Found("tv", "all", "holds", 0.004, 0.003, 0.005, 0.02, 1200, "tokens"))
    'tv on all 0.0040 [0.0030, 0.0050], limit 0.0200, n 1,200 tokens'
    """
    measured = " ".join(part for part in (number(cell.value), _interval(cell)) if part)
    limit = f"limit {_limit(cell)}" if cell.limit is not None else ""
    n = f"n {cell.n:,} {cell.units}".rstrip()
    head = f"{cell.name} {measured}".rstrip()
    return ", ".join(part for part in (head, limit, n, cell.note) if part)


def when(at: float) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def _counted(look: Look) -> Sequence[Found]:
    overrides = look.state.overrides
    return [c for c in look.finding.cells if not any(o.covers(c) for o in overrides)]


def _cells(row: Row) -> tuple[str, ...]:
    leg, cell = row.leg, row.decided
    sizes = f"{leg.first:,} to {leg.last:,}"
    groups = sizes if row.groups is None else f"{row.groups:,} of {sizes}"
    numbers = ("", "", "", "", "")
    if cell is not None:
        n = f"{cell.n:,} {cell.units}".rstrip()
        numbers = (line(cell.name), number(cell.value), _interval(cell), _limit(cell), n)
    return (leg.name, leg.traffic, row.state, groups, *numbers)


def _interval(cell: Found) -> str:
    if cell.low is None or cell.high is None:
        return ""
    return f"[{number(cell.low)}, {number(cell.high)}]"


def _limit(cell: Found) -> str:
    limit = number(cell.limit)
    return f"at least {limit}" if limit and cell.at_least else limit


def _here(story: Story) -> str:
    status = story.state.status
    if status == "completed":
        return "✓"
    return "✗" if story.state.ended else "▶"


def _status(story: Story) -> str:
    word = story.state.status.replace("_", " ").upper()
    return word if story.state.status == "completed" else f"{word} on {story.leg.name}"


def _served(story: Story) -> str:
    route = route_of(story.course, story.state)
    mirrored = f", {100 * route['mirror']:.3g} % are mirrored to it" if route["mirror"] else ""
    return f"{100 * route['share']:.3g} % of the traffic now{mirrored}"


def _waived(story: Story, now: float) -> list[str]:
    return [
        f"overridden until {when(o.expires)} by {o.actor}: {o.clause} on {o.slice} ({o.reason})"
        for o in story.state.overrides
        if o.expires > now
    ]


def _next(story: Story) -> list[str]:
    run, leg, status = story.run, story.leg, story.state.status
    if story.state.errors and not story.state.ended:
        once = "servanda promote again, once what failed is mended"
        halted = [f"servanda promotion rollback {run} --reason TEXT"] if status == "halted" else []
        return [once, *halted]
    if status == "awaiting_approval":
        return [f"servanda promotion approve {run} --reason TEXT"]
    if status == "running":
        left = story.state.since + leg.dwell_s - story.state.seen
        wait = f" in {duration(round(left))}" if left > 0 else ""
        return [f"servanda promote again{wait}"]
    if status == "awaiting_evidence":
        source = "let traffic come, and " if leg.live else ""
        return [f"{source}servanda promote again; --every 30s keeps looking"]
    if status == "halted":
        return [
            f"servanda promotion override {run} --clause ID --slice NAME --ttl 24h --reason TEXT",
            f"servanda promotion rollback {run} --reason TEXT",
        ]
    if status in ("rolled_back", "superseded"):
        return ["a mended build begins anew: servanda promote --fresh"]
    if leg.stage != "full":
        return [f"nothing: the promotion of this contract ends at {leg.stage}"]
    return ["servanda promote --every 5m keeps looking: what holds today may not tomorrow"]
