# What the page and `servanda gateway status` show of a slice: its state, the kernel that serves
# it, and its worst cell.

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from servanda.contract.model import WHOLE
from servanda.gateway.controller.status import (
    CellStatus,
    ControllerStatus,
    PoolStatus,
    SliceStatus,
)
from servanda.gateway.controller.web import format
from servanda.gateway.proxy.counters import numbers
from servanda.report.cell_text import Tick, together
from servanda.report.consequence import advice_sentences
from servanda.report.format import count, duration, line, part_of, percent, place
from servanda.report.table import table

_GLYPH = {"suspect": "?", "quarantined": "✗", "probation": "✗", "recovering": "↗"}
_TONE = {"suspect": "open", "recovering": "open"}
_RANK = {"quarantined": 0, "probation": 1, "suspect": 2, "recovering": 3, "active": 4}
_TONES = ("bad", "open", "good", "plain")  # the worst first
_LONGEST = 40  # characters of a name
# reason of a decision without a route -> the words of the status
_WITHOUT = {"no snapshot": "before the first route", "expired": "after the route expired"}
_EXCERPT = re.compile(r"\n *(?:\d+ \|.*|\^)$", re.M)  # of a contract, below a message


class State(NamedTuple):
    """The state of one slice, or of several together.

    Args:
        words: what several slices may have alike; tone: good, open, bad or plain.
        tick: of a slice that gathers evidence.
    """

    glyph: str
    words: str
    tone: str
    tick: Tick | None = None

    @property
    def text(self) -> str:
        return f"{self.words}, {self.tick.text}" if self.tick else self.words


def state(slice_: SliceStatus) -> State:
    """The state of a slice: "within limits" only after the return test."""
    if slice_.pin is not None and slice_.pin.to in ("stable", "infer"):
        tone = "bad" if slice_.pin.to == "stable" else "open"
        return State("●", f"pinned to {slice_.pin.to}", tone)
    if not slice_.cells:
        return State("–", "not watched", "plain")
    if slice_.status == "active" and not slice_.scored:
        return State("?", "without evidence", "open")
    evidence = slice_.tick
    if not returns(slice_) and evidence.outcome == "violated":
        return State(evidence.glyph, "above its limit", "bad")
    if slice_.status == "active":
        if evidence.outcome == "holds":
            return State(evidence.glyph, "active, within limits", "good")
        return State(evidence.glyph, "active", "open", evidence)
    would = "" if slice_.acts or slice_.status == "suspect" else "would be "
    return State(_GLYPH[slice_.status], f"{would}{slice_.status}", _TONE.get(slice_.status, "bad"))


def headline(status: ControllerStatus) -> State:
    """The number of slices in each state, with the glyph and the tone of the worst.

    Of several that gather evidence, that of the slice that is farthest from a decision.
    """
    states = sorted(map(state, status.slices), key=lambda one: _TONES.index(one.tone))
    if not states:
        return State("?", "no slice is watched", "open")
    parts = []
    for words, n in Counter(one.words for one in states).items():
        ticks = [one.tick for one in states if one.tick and one.words == words]
        rest = f", {together(ticks).text}{' on the slowest' * (n > 1)}" if ticks else ""
        parts.append(f"{n:,} {words}{rest}")
    return State(states[0].glyph, " · ".join(parts), states[0].tone)


def basis(status: ControllerStatus) -> str:
    """The requests that were scored, the shares diverted and routed to infer, failed observers."""
    launched = counted(status, "launched")[WHOLE]
    of = f" of {launched:,}" if launched else ""
    parts = [f"scored {status.scoring.scored:,}{of} requests"]
    slices, base = status.slices, status.base
    real, would = (_diverted_share(slices, base, if_acted=act) for act in (False, True))
    if real:
        parts.append(f"{percent(real)} of all traffic diverted")
    if would and would != real:
        parts.append(f"{percent(would)} would be diverted")
    if status.base != 1:
        parts.append(f"infer share {percent(status.base)}")
    if failed := +counted(status, "observer_failed"):
        names = ", ".join(f"{line(name, 20)} {n:,}" for name, n in failed.most_common())
        parts.append(f"! observers failed, and no answer changed ({names})")
    return " · ".join(parts)


def ordered(slices: Iterable[SliceStatus]) -> list[SliceStatus]:
    """The worst slice first, the whole traffic last."""

    def order(slice_: SliceStatus) -> tuple[bool, bool, int, float]:
        cell = worst(slice_)
        near = cell.nearness if cell is not None else -1.0
        return slice_.name == WHOLE, slice_.pin is None, _RANK[slice_.status], -near

    return sorted(slices, key=order)


def is_diverted(slice_: SliceStatus) -> bool:
    """Whether it was decided that stable serves a slice, acted on or not."""
    if slice_.pin is not None and slice_.pin.to in ("stable", "infer"):
        return slice_.pin.to == "stable"
    return slice_.status in ("quarantined", "probation")


def is_acted_on(slice_: SliceStatus) -> bool:
    """Whether the decision about a slice is acted on."""
    return slice_.acts or (slice_.pin is not None and slice_.pin.to == "stable")


def returns(slice_: SliceStatus) -> bool:
    """Whether a slice is or was diverted, so that the return test applies to it."""
    return slice_.status not in ("active", "suspect")


def _diverted_share(
    slices: Iterable[SliceStatus], base: float = 1.0, *, if_acted: bool = False
) -> float:
    """The share of all traffic that slices keep from infer; slices that overlap are added.

    Args:
        base: the share that infer serves of an active slice.
        if_acted: as if every decision were acted on.
    """
    total = 0.0
    for one in slices:
        pinned = one.pin.to if one.pin is not None else ""
        if pinned == "stable":
            total += one.share or 0.0
        elif pinned != "infer" and returns(one) and (one.acts or if_acted):
            kept = one.route / base if base > 0 else 0.0
            total += (one.share or 0.0) * max(0.0, 1.0 - kept)
    return min(1.0, total)


def problem(text: str, longest: int) -> str:
    """A problem on one line, without the excerpt of the contract."""
    return line(_EXCERPT.sub("", text), longest)


def counted(status: ControllerStatus, name: str) -> Counter[str]:
    """One count, of all gateways together."""
    total: Counter[str] = Counter()
    for gateway in status.gateways:
        total.update(dict(numbers(gateway.counts.get(name))))
    return total


def replicas(pool: PoolStatus) -> str:
    """How many servers of a pool are used by every gateway."""
    used = sum(replica.used_at > 0 and not replica.out_at for replica in pool.replicas)
    return f"{used} of {count(len(pool.replicas), 'replica')} used"


def happened(status: ControllerStatus, pool: str) -> list[str]:
    """The requests that a pool served for another reason than the routes, each with their number.

    Those that failed over from infer to stable; and those that came before the first route, or
    after the last one had expired.
    """
    found, failed = [], counted(status, "failovers") if pool == "stable" else Counter[str]()
    if failed:
        why = ", ".join(f"{line(reason, 20)} {n:,}" for reason, n in failed.most_common())
        found.append(f"{failed.total():,} failed over from infer ({why})")
    without: Counter[str] = Counter()
    for key, n in counted(status, "decisions").items():
        _, decided, reason = (*key.split("\t"), "", "")[:3]
        if decided == pool and reason in _WITHOUT:
            without[_WITHOUT[reason]] += n
    return found + [f"{n:,} {words}" for words, n in sorted(without.items())]


def who_serves(status: ControllerStatus) -> str:
    """The pool that serves the whole traffic, and whether decisions are acted on."""
    whole = next((slice_ for slice_ in status.slices if slice_.name == WHOLE), None)
    pool = served_by(whole or SliceStatus(WHOLE, "active", 0.0), status)
    acting = sum(slice_.acts for slice_ in status.slices)
    done = "are only logged" if status.mode == "observe" and not acting else "are acted on"
    about = f" about {count(acting, 'slice')}" if status.mode == "observe" and acting else ""
    every = "all " if pool in ("infer", "stable") else ""
    return f"{every}traffic is served by {pool}; decisions{about} {done}"


def notes(slice_: SliceStatus, now: float) -> list[str]:
    """The pin of a slice, the condition that its diversion lacks, and its relapses."""
    found = []
    if slice_.pin is not None:
        until = duration(max(0.0, slice_.pin.expires - now))
        who, reason = line(slice_.pin.actor, _LONGEST), line(slice_.pin.reason, 200)
        mode = f"{slice_.pin.to} " if slice_.pin.to in ("enforce", "observe") else ""
        found.append(f"{mode}by {who}, for {until} more: {reason}")
    if slice_.held:
        found.append(line(slice_.held, 200))
    if slice_.relapses:
        found.append(count(slice_.relapses, "relapse"))
    return found


def worst(slice_: SliceStatus) -> CellStatus | None:
    """The cell of a slice whose e-value is nearest to its alarm threshold."""
    return max(slice_.cells, key=lambda cell: (cell.nearness, _excess(cell)), default=None)


def _excess(cell: CellStatus) -> float:
    if cell.value is None or math.isnan(cell.value) or not cell.limit:
        return 0.0
    return abs(cell.value / cell.limit)


def of_threshold(fraction: float, threshold: str) -> str:
    """A log e-value as per cent of its log threshold; a ratio where it is beyond.

    >>> [of_threshold(x, "return threshold") for x in (0.496, 0.002, -1.0)]
    ['50 % of return threshold', '< 1 % of return threshold', '0 % of return threshold']
    >>> of_threshold(1.5, "alarm threshold")
    '1.5 times the alarm threshold'
    """
    if fraction > 1:
        return part_of(min(fraction, 99.9), f"the {threshold}")
    share = f"{100 * fraction:.0f} %" if fraction >= 0.01 else "< 1 %" if fraction > 0 else "0 %"
    return f"{share} of {threshold}"


def nearest(cell: CellStatus) -> tuple[float, float]:
    """Log e-value against the limit and its log threshold, of the process nearer to it."""
    bets = ((cell.log_evidence, cell.log_price), (cell.log_alarm, cell.log_alarm_price))
    return max(bets, key=lambda bet: bet[0] / bet[1] if 0 < bet[1] < math.inf else -math.inf)


def served_by(slice_: SliceStatus, status: ControllerStatus, *, if_acted: bool = False) -> str:
    """The pool that serves a slice, as a gateway chooses; the whole traffic contains every slice.

    Args:
        if_acted: as if every decision were acted on.
    """
    whole = [s for s in status.slices if s.name == WHOLE != slice_.name]
    pins = {s.pin.to for s in (slice_, *whole) if s.pin is not None}
    share = min([status.base, *(s.route for s in (slice_, *whole) if s.acts or if_acted)])
    if "stable" in pins or (share <= 0 and "infer" not in pins):
        return "stable"
    pool = "infer" if "infer" in pins or share >= 1 else f"infer {percent(share)}"
    parts = [s for s in status.slices if slice_.name == WHOLE != s.name]
    gone = _diverted_share(parts, status.base, if_acted=if_acted)
    return f"{pool}, {percent(gone)} diverted" if gone else pool


def would_be(slice_: SliceStatus, status: ControllerStatus) -> str:
    """The pool that would serve a slice if decisions were acted on; "" if it is the one of now."""
    meant = served_by(slice_, status, if_acted=True)
    same = meant == served_by(slice_, status) or slice_.pin is not None
    return "" if same else meant


def limit(cell: CellStatus) -> str:
    """The limit; "" where there is none."""
    return "" if cell.refutes else format.figure(cell.limit)


# The same as text for a terminal.

_HEAD = ("slice", "share", "value", "limit", "served by", "state")
_RIGHT = (1, 2, 3)  # numbers
_WIDEST = 48  # of a column; a longer name is cut


def text(status: ControllerStatus, url: str) -> str:
    """Problems, the slices by state, their basis, one row per slice, and the next command."""
    head = headline(status)
    lines = [f"! {problem(text, 300)}" for text in status.problems]
    lines += [f"{head.glyph} {head.text}", _where(status), _pools(status), _scored(status), ""]
    slices = ordered(status.slices)
    rows = [_HEAD, *(_cells(slice_, status) for slice_ in slices)]
    first, *rest = table(rows, right=_RIGHT, widest=_WIDEST)
    lines += [f"  {first}"]
    for slice_, cells in zip(slices, rest, strict=True):
        lines += [f"{state(slice_).glyph} {cells}"]
        below = [*notes(slice_, status.now), *advice_sentences(slice_.advice)]
        lines += [f"    {note}" for note in below]
    lines += ["", f"mode: {status.mode}: {who_serves(status)}.{_next(status, url)}"]
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
            part += f", {replicas(pool)}"
        part += ", circuit breaker open" * pool.open
        parts.append(", ".join([part, *happened(status, name)]))
    parts.append(count(len(status.gateways), "gateway"))
    return " · ".join(parts)


def _scored(status: ControllerStatus) -> str:
    scoring = status.scoring
    parts = [basis(status), f"{scoring.queued:,} queued"]
    if scoring.dropped:
        parts.append(f"{scoring.dropped:,} dropped")
    parts.append(count(max((slice_.keys for slice_ in status.slices), default=0), "user"))
    return " · ".join(parts)


def _cells(slice_: SliceStatus, status: ControllerStatus) -> list[str]:
    words, cell = state(slice_).text, worst(slice_)
    numbers = ["", ""]
    if cell is not None:
        numbers = [format.measured(cell.value), limit(cell)]
        if slice_.scored:
            words += f"  {of_threshold(cell.nearness, 'alarm threshold')}"
            words += f", {count(slice_.scored, 'request')}, {count(slice_.keys, 'user')}"
    serves = served_by(slice_, status)
    if meant := would_be(slice_, status):
        serves += f" (would be {meant})"
    return [place(slice_.name, _LONGEST), percent(slice_.share), *numbers, serves, words]


def _next(status: ControllerStatus, url: str) -> str:
    diverted = filter(is_diverted, status.slices)
    would = [slice_ for slice_ in diverted if not is_acted_on(slice_)]
    if not would:
        return ""
    name = shlex.quote(line(would[0].name))
    act = f"servanda gateway pin {name} --to enforce --ttl 24h --reason TEXT --gateway {url}"
    return f" To act on decisions about {name}: {act}"
