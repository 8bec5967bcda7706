# The page of a leader: how things stand, on one screen.  Served whole, and again as a fragment
# for the script that keeps it fresh; without the script the browser loads it anew.

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from servanda.gateway.controller.status import (
    CellStanding,
    GatewayStanding,
    SliceStanding,
    Standing,
)
from servanda.gateway.controller.web import format, phrases
from servanda.gateway.controller.web.charts import HEIGHT, WIDTH, Part, Spark, served, spark
from servanda.gateway.http.api_keys import Holder
from servanda.gateway.proxy.counters import numbers
from servanda.gateway.routing.state import Transition
from servanda.report.format import count, duration, line, percent

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RANK = {"quarantined": 0, "probation": 1, "suspect": 2, "recovering": 3, "active": 4}
_MOVES = 12  # of the latest decisions
_REASONS = 5  # why requests are no evidence, that are shown
_TYPES = {"css": "text/css", "js": "text/javascript"}


@dataclass(frozen=True)
class Asset:
    """A file that the page loads; its address changes with its content."""

    data: bytes
    media_type: str

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:12]


@dataclass(frozen=True)
class Row:
    """A slice on the page.

    Args:
        share: of the traffic; now: who serves it; meant: who would, by what was decided.
        served, would: who served it, and who would have.
        cell: the one that is nearest to its price; rest: the others.
    """

    one: SliceStanding
    name: str
    share: str
    glyph: str
    state: str
    tone: str
    since: str
    why: list[str]
    now: str
    meant: str
    served: tuple[Part, ...]
    would: tuple[Part, ...]
    total: str
    cell: CellStanding | None
    rest: tuple[CellStanding, ...]
    spark: Spark | None

    @property
    def pinned(self) -> bool:
        return self.one.pin is not None


@dataclass(frozen=True)
class Move:
    """A decision of the past."""

    at: str
    stamp: str
    slice: str
    text: str
    tone: str
    numbers: str
    reason: str


def _assets() -> Mapping[str, Asset]:
    folder = resources.files("servanda.gateway.controller.web") / "assets"
    names = ("page.css", "page.js")
    return {
        name: Asset((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]) for name in names
    }


ASSETS: Mapping[str, Asset] = _assets()


def page(standing: Standing, holder: Holder) -> str:
    """The whole page.

    Args:
        holder: who looks at it: pins are offered to whoever may pin.
    """
    return _template("page.html").render(**view(standing, holder))


def fragment(standing: Standing, holder: Holder) -> str:
    """What changes of the page."""
    return _template("fragment.html").render(**view(standing, holder))


@lru_cache(maxsize=2)
def _template(name: str) -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("servanda.gateway.controller.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


def _printable(value: Any) -> Any:
    """Texts without control characters, which HTML has no way to hold; markup as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _CONTROL.sub("\ufffd", value)


def view(standing: Standing, holder: Holder) -> dict[str, Any]:
    """Everything that the page shows, by the names that its templates use."""
    return {
        "s": standing,
        "head": phrases.headline(standing),
        "rows": rows(standing),
        "left_out": [
            (line(one.clause, 60), phrases.place(one.slice), line(one.why, 200))
            for one in standing.left_out
        ],
        "moves": [_move(t, standing.now) for t in reversed(standing.transitions[-_MOVES:])],
        "pools": _pools(standing),
        "scoring": _scoring(standing),
        "gateways": [_gateway(one, standing) for one in standing.gateways],
        "problems": [phrases.problem(text, 400) for text in standing.problems],
        "name": line(standing.name, 80),
        "digest": standing.contract.removeprefix("sha256:")[:8],
        "run": " ".join(filter(None, (line(standing.run, 40), line(standing.leg, 40)))),
        "holder": holder,
        "may_pin": holder.may("pin"),
        "now": format.clock(standing.now, standing.now),
        "now_stamp": format.stamp(standing.now),
        "assets": ASSETS,
        "spark_width": WIDTH,
        "spark_height": HEIGHT,
        "measured": format.measured,
        "evidence": format.evidence,
        "value_of": phrases.value,
        "versus_limit": phrases.versus,
        "counted": count,
        "nearest": phrases.nearest,
        "returns": phrases.returns,
        "percent": percent,
        "line": line,
    }


def rows(standing: Standing) -> tuple[Row, ...]:
    """Worst first, the whole traffic last."""

    def order(one: SliceStanding) -> tuple[bool, bool, int, float]:
        cell = phrases.worst(one)
        near = cell.nearness if cell is not None else -1.0
        return one.name == "all", one.pin is None, _RANK[one.status], -near

    return tuple(_row(one, standing) for one in sorted(standing.slices, key=order))


def _row(one: SliceStanding, standing: Standing) -> Row:
    glyph, state, tone = phrases.state(one)
    cell = phrases.worst(one)
    total = sum(one.served.values())
    return Row(
        one=one,
        name=phrases.place(one.name, 120),
        share=percent(one.share),
        glyph=glyph,
        state=state,
        tone=tone,
        since=duration(standing.now - one.since) if one.since else "",
        why=phrases.why(one, standing.now),
        now=phrases.now(one, standing),
        meant=phrases.meant(one, standing),
        served=served(one.served),
        would=served(one.would) if dict(one.would) != dict(one.served) else (),
        total=f"{total:,}" if total else "",
        cell=cell,
        rest=tuple(c for c in one.cells if c is not cell),
        spark=spark(one, cell, standing.now),
    )


def _move(t: Transition, now: float) -> Move:
    numbers = []
    if t.cell is not None and t.value == t.value:
        limit = f", limit {format.figure(t.limit)}" if t.limit == t.limit else ""
        numbers.append(f"{format.measured(t.value)}{limit}")
    if t.log_evidence == t.log_evidence:
        numbers.append(
            f"evidence {format.evidence(t.log_evidence)} of {format.evidence(t.log_price)}"
        )
    if t.n:
        numbers.append(f"{count(t.n, 'request')}, {count(t.keys, 'key')}")
    before, after = line(t.before, 40), line(t.after, 40)
    verb = "" if t.acted or after.partition(",")[0] in ("active", "suspect") else "would be "
    who = f"{line(t.actor, 40)}: " if t.actor != "servanda" else ""
    return Move(
        at=format.clock(t.at, now),
        stamp=format.stamp(t.at),
        slice=phrases.place(t.slice, 60),
        text=f"{before} → {verb}{after}" if before != after else after,
        tone=phrases.TONE.get(t.after.partition(",")[0], "bad"),
        numbers=" · ".join(numbers),
        reason=who + line(t.reason, 300),
    )


def _pools(standing: Standing) -> list[dict[str, Any]]:
    totals = _totals(standing)
    bars = {part.pool: part for part in served(totals)}
    found = []
    for name, pool in standing.pools.items():
        flight = f"{pool.in_flight:,} in flight, {pool.peak:,} at most"
        if pool.headroom is not None:
            flight += f" of {pool.most:,}: room for {pool.headroom:,}"
        elif name == "stable":
            flight += "; how much it can take is not known"
        if name == "stable" and (instead := phrases.failovers(standing)):
            flight += f"; {instead}"
        found.append(
            {
                "name": name,
                "requests": f"{totals.get(name, 0):,}",
                "bar": bars.get(name),
                "flight": flight,
                "open": pool.open,
            }
        )
    return found


def _totals(standing: Standing) -> dict[str, int]:
    """Requests by the pool whose reply they got, of all gateways."""
    totals: Counter[str] = Counter()
    for gateway in standing.gateways:
        for key, n in numbers(gateway.counts.get("answers")):
            totals[key.rpartition("\t")[2]] += n
    return totals


def _scoring(standing: Standing) -> dict[str, Any]:
    s = standing.scoring
    ran = max(standing.now - standing.began, 1.0) if standing.began else None
    facts = [f"{s.scored:,} scored", f"{s.missing:,} missing", f"{s.dropped:,} dropped"]
    facts += [f"{n:,} {line(why, 40)}" for why, n in s.outside.items() if n]
    facts += [f"{s.restarts:,} restarts"] if s.restarts else []
    queue = f"{s.queued:,} of {s.room:,} wait" if s.room else f"{s.queued:,} wait"
    if s.lag_s is not None:
        queue += f", {duration(s.lag_s)} behind"
    took = duration(s.seconds)
    spent = f"{took} of the train kernel"
    if ran is not None:
        spent += f", {s.seconds / ran:.2g} s a second"
    if s.budget:
        spent += f" of {s.budget:.2g} allowed"
    told = {"alive": s.alive, "facts": " · ".join(facts), "queue": queue, "spent": spent}
    return {**told, "unsampled": _unsampled(standing)}


def _unsampled(standing: Standing) -> str:
    """Why requests that were drawn for the sample are no evidence, the most frequent first."""
    found: Counter[str] = Counter()
    for one in standing.gateways:
        for why, n in numbers(one.counts.get("unsampled")):
            found[line(why, 40)] += int(n)
    parts = [f"{n:,} {why}" for why, n in found.most_common(_REASONS)]
    more = len(found) - len(parts)
    return " · ".join([*parts, *([f"{more} more reasons"] if more > 0 else [])])


def _gateway(one: GatewayStanding, standing: Standing) -> dict[str, Any]:
    silent = standing.now - one.heard
    return {
        "name": line(one.name, 60),
        "heard": f"{duration(silent)} ago" if silent >= 1 else "now",
        "late": silent > 10,
        "version": one.version,
        "old": one.version < standing.version,
        "behind": one.behind,
        "skew": f"{one.skew_s:+.1f} s" if abs(one.skew_s) >= 1 else "",
        "up": duration(standing.now - one.start),
    }
