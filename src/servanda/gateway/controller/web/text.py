# The status of a controller, as text for a terminal.

from __future__ import annotations

import math
import shlex

from servanda.gateway.controller.status import ControllerStatus, SliceStatus
from servanda.gateway.controller.web import format, phrases, trigger
from servanda.report.format import count, line, percent
from servanda.report.table import table

_HEAD = ("slice", "share", "value", "limit", "stable", "served by", "state")
_RIGHT = (1, 2, 3, 4)  # numbers
_WIDEST = 48  # of a column; a longer name is cut


def text(status: ControllerStatus, url: str) -> str:
    """Problems, one sentence, its basis, one row per slice, and the next command."""
    head = phrases.headline(status)
    lines = [f"! {phrases.problem(text, 300)}" for text in status.problems]
    lines += [f"{head.glyph} {head.text}", _where(status), _pools(status), _scored(status), ""]
    ordered = sorted(status.slices, key=lambda slice_: (slice_.name == "all", -_rank(slice_)))
    rows = [_HEAD, *(_cells(slice_, status) for slice_ in ordered)]
    first, *rest = table(rows, right=_RIGHT, widest=_WIDEST)
    lines += [f"  {first}"]
    for slice_, cells in zip(ordered, rest, strict=True):
        glyph, _, _ = phrases.state(slice_)
        lines += [f"{glyph} {cells}"]
        lines += [f"    {why}" for why in phrases.why(slice_, status.now)]
    lines += ["", f"mode: {status.mode}.{_next(status, url)}"]
    return "\n".join(part.rstrip() for part in lines)


def _rank(slice_: SliceStatus) -> float:
    cell = phrases.worst(slice_)
    return 10.0 * phrases.is_diverted(slice_) + (cell.nearness if cell is not None else -1.0)


def _where(status: ControllerStatus) -> str:
    run = " ".join(filter(None, (line(status.run, 40), line(status.leg, 40))))
    digest = status.contract.removeprefix("sha256:")[:8]
    parts = [line(status.name, 80), f"contract {digest}", f"route {status.version}", run]
    return " · ".join(filter(None, parts))


def _pools(status: ControllerStatus) -> str:
    parts = []
    for name, pool in status.pools.items():
        part = f"{name} {pool.in_flight} in flight"
        if pool.headroom is not None:
            part += f", room for {pool.headroom}"
        if pool.replicas:
            part += f", {phrases.replicas(pool)}"
        parts.append(f"{part}, circuit breaker open" if pool.open else part)
    parts.append(count(len(status.gateways), "gateway"))
    parts += filter(None, [phrases.failovers(status)])
    return " · ".join(parts)


def _scored(status: ControllerStatus) -> str:
    scoring = status.scoring
    parts = [phrases.headline(status).more, f"{scoring.queued:,} queued"]
    if scoring.dropped:
        parts.append(f"{scoring.dropped:,} dropped")
    parts.append(count(max((slice_.keys for slice_ in status.slices), default=0), "user"))
    return " · ".join(parts)


def _cells(slice_: SliceStatus, status: ControllerStatus) -> list[str]:
    _, state, _ = phrases.state(slice_)
    cause = trigger.trigger(slice_, status)
    cell, near = trigger.cell_of(slice_, cause), phrases.worst(slice_)
    numbers = ["", "", ""]
    if cell is not None and near is not None:
        stable = format.measured(cell.stable) if cell.stable is not None else ""
        numbers = [format.measured(cell.value), phrases.limit(cell), stable]
        if cause is not None:  # the value that diverted it, next to the evidence since then
            limit = "" if math.isnan(cause.limit) else format.figure(cause.limit)
            numbers[:2] = [trigger.value(cause), limit]
            state += f" ({trigger.fresh(slice_, cell)}: {format.measured(cell.value)})"
        if slice_.scored:
            state += f"  {phrases.of_threshold(near.nearness, 'alarm threshold')}"
            state += f", {count(slice_.scored, 'request')}, {count(slice_.keys, 'user')}"
    serves = phrases.served_by(slice_, status)
    meant = phrases.served_by(slice_, status, if_acted=True)
    if meant != serves and not phrases.is_acted_on(slice_) and slice_.pin is None:
        serves += f" (would be {phrases.instead_of(serves, meant)})"
    return [phrases.place(slice_.name), percent(slice_.share), *numbers, serves, state]


def _next(status: ControllerStatus, url: str) -> str:
    diverted = filter(phrases.is_diverted, status.slices)
    would = [slice_ for slice_ in diverted if not phrases.is_acted_on(slice_)]
    if not would:
        return ""
    name = shlex.quote(line(would[0].name))
    act = f"servanda gateway pin {name} --to enforce --ttl 24h --reason TEXT --gateway {url}"
    return f" To act on decisions about {name}: {act}"
