# How things stand at a leader, as text for a terminal.

from __future__ import annotations

import math
import shlex

from servanda.gateway.controller.status import SliceStanding, Standing
from servanda.gateway.controller.web import format, phrases
from servanda.report.format import count, line, percent
from servanda.report.table import table

_HEAD = ("slice", "share", "value", "limit", "stable", "served by", "state")
_RIGHT = (1, 2, 3, 4)  # numbers
_WIDEST = 40  # of a column; a longer name is cut


def text(standing: Standing, url: str) -> str:
    """Problems, one sentence, what it rests on, a row a slice, and the next move."""
    head = phrases.headline(standing)
    told = [f"! {phrases.problem(text, 300)}" for text in standing.problems]
    told += [f"{head.glyph} {head.text}", _where(standing), _pools(standing), _scored(standing), ""]
    ordered = sorted(standing.slices, key=lambda one: (one.name == "all", -_rank(one)))
    rows = [_HEAD, *(_cells(one, standing) for one in ordered)]
    first, *rest = table(rows, right=_RIGHT, widest=_WIDEST)
    told += [f"  {first}"]
    for one, cells in zip(ordered, rest, strict=True):
        glyph, _, _ = phrases.state(one)
        told += [f"{glyph} {cells}"]
        told += [f"    {why}" for why in phrases.why(one, standing.now)]
    told += ["", f"mode: {standing.mode}.{_next(standing, url)}"]
    return "\n".join(part.rstrip() for part in told)


def _rank(one: SliceStanding) -> float:
    cell = phrases.worst(one)
    return 10.0 * phrases.gone(one) + (cell.nearness if cell is not None else -1.0)


def _where(standing: Standing) -> str:
    run = " ".join(filter(None, (line(standing.run, 40), line(standing.leg, 40))))
    digest = standing.contract.removeprefix("sha256:")[:8]
    parts = [line(standing.name, 80), f"contract {digest}", f"route {standing.version}", run]
    return " · ".join(filter(None, parts))


def _pools(standing: Standing) -> str:
    parts = []
    for name, pool in standing.pools.items():
        told = f"{name} {pool.in_flight} in flight"
        if pool.headroom is not None:
            told += f", room for {pool.headroom}"
        parts.append(f"{told}, held to be broken" if pool.open else told)
    parts.append(count(len(standing.gateways), "gateway"))
    parts += filter(None, [phrases.failovers(standing)])
    return " · ".join(parts)


def _scored(standing: Standing) -> str:
    scoring = standing.scoring
    parts = [phrases.headline(standing).more, f"{scoring.queued:,} wait"]
    if scoring.dropped:
        parts.append(f"{scoring.dropped:,} dropped")
    keys = max((one.keys for one in standing.slices), default=0)
    parts.append(f"keys {keys:,}")
    return " · ".join(parts)


def _cells(one: SliceStanding, standing: Standing) -> list[str]:
    _, state, _ = phrases.state(one)
    cell = phrases.worst(one)
    numbers = ["", "", ""]
    if cell is not None:
        stable = format.measured(cell.stable) if cell.stable is not None else ""
        numbers = [format.measured(cell.value), phrases.limit(cell), stable]
        evidence, price = phrases.nearest(cell)
        if math.isfinite(price) and one.scored:
            state += f"  e {format.evidence(evidence)} of {format.evidence(price)}"
            state += f", {count(one.scored, 'request')}, {count(one.keys, 'key')}"
    serves, meant = phrases.now(one, standing), phrases.meant(one, standing)
    if meant != serves and not phrases.moved(one) and one.pin is None:
        serves += f" (would be {meant})"
    return [phrases.place(one.name), percent(one.share), *numbers, serves, state]


def _next(standing: Standing, url: str) -> str:
    would = [one for one in standing.slices if phrases.gone(one) and not phrases.moved(one)]
    if not would:
        return ""
    name = shlex.quote(line(would[0].name))
    act = f"servanda gateway pin {name} --to enforce --ttl 24h --reason TEXT --gateway {url}"
    return f" To let it act: {act}"
