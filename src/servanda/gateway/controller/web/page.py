# The page of a controller: its status on one screen.  It is served whole, and as a fragment for
# the script that updates it; without the script the browser reloads the page.

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from servanda.gateway.controller.status import ControllerStatus, GatewayStatus, SliceStatus
from servanda.gateway.controller.web import format, phrases, trigger
from servanda.gateway.controller.web.charts import (
    AXIS,
    HEIGHT,
    WIDTH,
    Span,
    served_parts,
    span,
    spark,
)
from servanda.gateway.controller.web.lanes import lane
from servanda.gateway.http.api_keys import Holder
from servanda.gateway.routing.state import Transition
from servanda.report.format import count, duration, line, part_of, percent
from servanda.report.html import environment

_RANK = {"quarantined": 0, "probation": 1, "suspect": 2, "recovering": 3, "active": 4}
_MOVES = 12  # latest decisions that are shown
_LANES = 12  # slices whose history is shown; the others fold out
_REASONS = 5  # reasons why requests are no evidence, that are shown
_PACKAGE = "servanda.gateway.controller.web"


@dataclass(frozen=True)
class Asset:
    """A file that the page loads; its address changes with its content."""

    data: bytes
    media_type: str

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:12]


ASSETS: Mapping[str, Asset] = {
    name: Asset((resources.files(_PACKAGE) / "assets" / name).read_bytes(), media_type)
    for name, media_type in (("page.css", "text/css"), ("page.js", "text/javascript"))
}


def page(status: ControllerStatus, holder: Holder) -> str:
    """The whole page.

    Args:
        holder: the reader: pins are offered to those who may pin.
    """
    return _template("page.html").render(**view(status, holder))


def fragment(status: ControllerStatus, holder: Holder) -> str:
    """The part of the page that changes."""
    return _template("fragment.html").render(**view(status, holder))


@lru_cache(maxsize=2)
def _template(name: str) -> Any:
    return environment(_PACKAGE).get_template(name)


def view(status: ControllerStatus, holder: Holder) -> dict[str, Any]:
    """Everything that the page shows, by the names that its templates use."""
    axis = span(status)
    shown = rows(status, axis)
    lanes = [lane(row["slice"], status, axis) for row in shown]
    return {
        "s": status,
        "head": phrases.headline(status),
        "rows": shown,
        "lanes": (lanes[:_LANES], lanes[_LANES:]),
        "axis": axis,
        "left_out": [
            (line(cell.clause, 60), phrases.place(cell.slice), line(cell.why, 200))
            for cell in status.left_out
        ],
        "moves": [_move(t, status.now) for t in reversed(status.transitions[-_MOVES:])],
        "pools": _pools(status),
        "scoring": _scoring(status),
        "gateways": [_gateway(cell, status) for cell in status.gateways],
        "problems": [phrases.problem(text, 400) for text in status.problems],
        "name": line(status.name, 80),
        "digest": status.contract.removeprefix("sha256:")[:8],
        "run": " ".join(filter(None, (line(status.run, 40), line(status.leg, 40)))),
        "holder": holder,
        "may_pin": holder.may("pin"),
        "now": format.clock(status.now, status.now),
        "now_stamp": format.stamp(status.now),
        "assets": ASSETS,
        "spark_width": WIDTH,
        "spark_height": HEIGHT,
        "spark_axis": AXIS,
        "format": format,
        "phrases": phrases,
        "trigger": trigger,
        "counted": count,
        "percent": percent,
        "line": line,
    }


def rows(status: ControllerStatus, axis: Span | None = None) -> list[dict[str, Any]]:
    """One row per slice: the worst first, the whole traffic last."""

    def order(slice_: SliceStatus) -> tuple[bool, bool, int, float]:
        cell = phrases.worst(slice_)
        near = cell.nearness if cell is not None else -1.0
        return slice_.name == "all", slice_.pin is None, _RANK[slice_.status], -near

    axis = axis or span(status)
    return [_row(slice_, status, axis) for slice_ in sorted(status.slices, key=order)]


def _row(slice_: SliceStatus, status: ControllerStatus, axis: Span) -> dict[str, Any]:
    glyph, state, tone = phrases.state(slice_)
    cause = trigger.trigger(slice_, status)
    cell, near = trigger.cell_of(slice_, cause), phrases.worst(slice_)
    now = phrases.served_by(slice_, status)
    same = dict(slice_.would) == dict(slice_.served)
    return {
        "slice": slice_,
        "name": phrases.place(slice_.name, 400),
        "share": percent(slice_.share),
        "glyph": glyph,
        "state": state,
        "tone": tone,
        "since": duration(status.now - slice_.since) if slice_.since else "",
        "why": phrases.why(slice_, status.now),
        "now": now,
        "meant": phrases.instead_of(now, phrases.served_by(slice_, status, if_acted=True)),
        "served": served_parts(slice_.served),
        "would": () if same else served_parts(slice_.would),
        "cause": cause,
        "cell": cell,
        "near": near,
        "rest": [c for c in slice_.cells if c is not cell],
        "spark": spark(slice_, near, axis),
    }


def _move(t: Transition, now: float) -> dict[str, str]:
    numbers = []
    if t.cell is not None and t.value == t.value:
        limit = f", limit {format.figure(t.limit)}" if t.limit == t.limit else ""
        numbers.append(f"{format.measured(t.value)}{limit}")
    if t.log_evidence == t.log_evidence:
        numbers.append(
            f"e-value {format.evidence(t.log_evidence)}, threshold {format.evidence(t.log_price)}"
        )
    if t.n:
        numbers.append(f"{count(t.n, 'request')}, {count(t.keys, 'user')}")
    before, after = line(t.before, 40), line(t.after, 40)
    still = t.before == "quarantined" and t.after == "probation"  # the route stays as it is
    verb = "would be "
    if t.acted or still or after.partition(",")[0] in ("active", "suspect"):
        verb = ""
    who = f"{line(t.actor, 40)}: " if t.actor != "servanda" else ""
    return {
        "at": format.clock(t.at, now),
        "stamp": format.stamp(t.at),
        "slice": phrases.place(t.slice, 60),
        "text": f"{before} → {verb}{after}" if before != after else after,
        "tone": phrases.TONE.get(t.after.partition(",")[0], "bad"),
        "numbers": " · ".join(numbers),
        "reason": who + line(t.reason, 300),
    }


def _pools(status: ControllerStatus) -> list[dict[str, Any]]:
    totals: Counter[str] = Counter()  # requests by the pool whose reply they got
    for key, n in phrases.counted(status, "answers").items():
        totals[key.rpartition("\t")[2]] += n
    bars = {part.pool: part for part in served_parts(totals)}
    pools = []
    for name, pool in status.pools.items():
        flight = f"{pool.in_flight:,} in flight, peak {pool.peak:,}"
        if pool.headroom is not None:
            flight += f" of {pool.most:,}: room for {pool.headroom:,}"
        elif name == "stable":
            flight += "; its capacity is not declared"
        if pool.replicas:
            flight += f"; {phrases.replicas(pool)}"
        if name == "stable" and (instead := phrases.failovers(status)):
            flight += f"; {instead}"
        pools.append(
            {
                "name": name,
                "requests": f"{totals[name]:,}",
                "bar": bars.get(name),
                "flight": flight,
                "open": pool.open,
            }
        )
    return pools


def _scoring(status: ControllerStatus) -> dict[str, Any]:
    s = status.scoring
    ran = max(status.now - status.began, 1.0) if status.began else None
    facts = [f"{s.scored:,} scored", f"{s.missing:,} missing", f"{s.dropped:,} dropped"]
    facts += [f"{n:,} {line(why, 40)}" for why, n in s.outside.items() if n]
    facts += [count(s.restarts, "restart")] if s.restarts else []
    queue = (
        f"{s.queued:,} of {count(s.room, 'row')} queued"
        if s.room
        else f"{count(s.queued, 'row')} queued"
    )
    if s.lag_s is not None:
        queue += f", {duration(s.lag_s)} behind"
    spent = f"{duration(s.seconds)} of scoring"
    if ran is not None:
        load = s.seconds / ran
        spent = f"load {part_of(load, 'its time')}"
        if s.budget:
            spent = f"load {part_of(load / s.budget, 'its budget')}"
            spent += f" ({part_of(load, 'its time')}, {percent(s.budget)} allowed)"
    return {
        "alive": s.alive,
        "facts": " · ".join(facts),
        "queue": queue,
        "spent": spent,
        "unsampled": _unsampled(status),
    }


def _unsampled(status: ControllerStatus) -> str:
    """The reasons why sampled requests are no evidence, the most frequent first."""
    reasons: Counter[str] = Counter()
    for why, n in phrases.counted(status, "unsampled").items():
        reasons[line(why, 40)] += int(n)
    parts = [f"{n:,} {why}" for why, n in reasons.most_common(_REASONS)]
    more = len(reasons) - len(parts)
    return " · ".join([*parts, *([count(more, "more reason")] if more > 0 else [])])


def _gateway(gateway: GatewayStatus, status: ControllerStatus) -> dict[str, Any]:
    silent = status.now - gateway.heard
    return {
        "name": line(gateway.name, 60),
        "heard": f"{duration(silent)} ago" if silent >= 1 else "now",
        "late": silent > 10,
        "version": gateway.version,
        "old": gateway.version < status.version,
        "behind": gateway.behind,
        "skew": f"{gateway.skew_s:+.1f} s" if abs(gateway.skew_s) >= 1 else "",
        "up": duration(status.now - gateway.start),
    }
