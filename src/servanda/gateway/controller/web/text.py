# The status of a controller, as text for a terminal.

from __future__ import annotations

import shlex

from servanda.gateway.controller.status import ControllerStatus, SliceStatus
from servanda.gateway.controller.web import format, summary
from servanda.report.consequence import advice_sentences
from servanda.report.format import count, line, percent, place
from servanda.report.table import table

_HEAD = ("slice", "share", "value", "limit", "served by", "state")
_RIGHT = (1, 2, 3)  # numbers
_LONGEST = 40  # characters of a slice's name
_WIDEST = 48  # of a column; a longer name is cut


def text(status: ControllerStatus, url: str) -> str:
    """Problems, the slices by state, their basis, one row per slice, and the next command."""
    head = summary.headline(status)
    lines = [f"! {summary.problem(text, 300)}" for text in status.problems]
    lines += [f"{head.glyph} {head.text}", _where(status), _pools(status), _scored(status), ""]
    ordered = summary.ordered(status.slices)
    rows = [_HEAD, *(_cells(slice_, status) for slice_ in ordered)]
    first, *rest = table(rows, right=_RIGHT, widest=_WIDEST)
    lines += [f"  {first}"]
    for slice_, cells in zip(ordered, rest, strict=True):
        lines += [f"{summary.state(slice_).glyph} {cells}"]
        notes = [*summary.notes(slice_, status.now), *advice_sentences(slice_.advice)]
        lines += [f"    {note}" for note in notes]
    lines += ["", f"mode: {status.mode}: {summary.who_serves(status)}.{_next(status, url)}"]
    return "\n".join(part.rstrip() for part in lines)


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
            part += f", {summary.replicas(pool)}"
        part += ", circuit breaker open" * pool.open
        parts.append(", ".join([part, *summary.happened(status, name)]))
    parts.append(count(len(status.gateways), "gateway"))
    return " · ".join(parts)


def _scored(status: ControllerStatus) -> str:
    scoring = status.scoring
    parts = [summary.basis(status), f"{scoring.queued:,} queued"]
    if scoring.dropped:
        parts.append(f"{scoring.dropped:,} dropped")
    parts.append(count(max((slice_.keys for slice_ in status.slices), default=0), "user"))
    return " · ".join(parts)


def _cells(slice_: SliceStatus, status: ControllerStatus) -> list[str]:
    state, cell = summary.state(slice_).text, summary.worst(slice_)
    numbers = ["", ""]
    if cell is not None:
        numbers = [format.measured(cell.value), summary.limit(cell)]
        if slice_.scored:
            state += f"  {summary.of_threshold(cell.nearness, 'alarm threshold')}"
            state += f", {count(slice_.scored, 'request')}, {count(slice_.keys, 'user')}"
    serves = summary.served_by(slice_, status)
    if meant := summary.would_be(slice_, status):
        serves += f" (would be {meant})"
    return [place(slice_.name, _LONGEST), percent(slice_.share), *numbers, serves, state]


def _next(status: ControllerStatus, url: str) -> str:
    diverted = filter(summary.is_diverted, status.slices)
    would = [slice_ for slice_ in diverted if not summary.is_acted_on(slice_)]
    if not would:
        return ""
    name = shlex.quote(line(would[0].name))
    act = f"servanda gateway pin {name} --to enforce --ttl 24h --reason TEXT --gateway {url}"
    return f" To act on decisions about {name}: {act}"
